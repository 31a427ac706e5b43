r"""Parse numbers in the notations that people and models use.

    number   = [sign] (whole ["." digits] | "." digits) [exponent] | [sign] [digits " "] whole "/" [sign] whole
    sign     = "+", "-" or U+2212
    whole    = digits, or groups of three behind commas: 1,234,567
    exponent = "e" or "E", a sign or none, and up to three digits

\frac{1}{2}, \dfrac12 and U+00BD are fractions, and 0.1\overline{6}, 0.1\bar 6 and 0.1(6) are 1/6. 12{,}345, 12\,345,
12'345 and a narrow space (U+202F) separate thousands. In a longer text, a space does so as well. Unicode's minus signs
and dashes are signs, except for the em dash. Digits are the decimal digits of all scripts, also full-width ones.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER = re.compile(
    rf"([-+\u2212]?)(?:(?:(\d+) )?({_WHOLE})/([-+\u2212]?{_WHOLE})"
    # Three digits of an exponent: 10 ** 999999999 would fill the memory.
    rf"|({_WHOLE}(?:\.\d*)?|\.\d+)(?:[eE]([-+\u2212]?\d{{1,3}}))?)",
    re.ASCII,
)
_FRAC = re.compile(
    r" ?([-+\u2212]?)\\[dtc]?frac(?:\s*\{\s*([-\u2212]?)(\d+)\s*\}|\s*(\d))(?:\s*\{\s*([-\u2212]?)(\d+)\s*\}|\s*(\d))",
    re.ASCII,
)
_REPEATING = re.compile(
    r"([-+\u2212]?)(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))", re.ASCII
)
_ROOT, _TIMES, _PI = "\u221a", "\u00d7", "\u03c0"
_PLAIN = str.maketrans(
    {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}
    | {"\uff0c": ", ", "\u066b": ".", "\u066c": ","}
    | dict.fromkeys("\u2010\u2011\u2012\u2013\ufe63\uff0d", "-")
    | dict.fromkeys("\u2044\u2215", "/")
    | dict.fromkeys("\u2217\u2219\u22c6\u2715\u2716\u2a2f", _TIMES)
    | dict.fromkeys("\u00b1\u2213\u221b\u221c\u2260", _ROOT)
)
"""Maps full-width characters, dashes and fraction bars to ASCII, and signs of one meaning to one of them."""
_FULL_WIDTH_COMMA = re.compile("(?<=[\uff10-\uff19])\uff0c(?=[\uff10-\uff19])")
_DIGIT = re.compile(r"[^\D0-9]")
_MULTIPLE = re.compile(
    "(?<=[0-9]) ?[\u5341\u767e\u5343\u842c\u4e07\u5104\u4ebf\u5146\u70b9\u9ede\ub9cc\uc5b5\ucc9c\ubc31]"
    "|\u5206[\u4e4b\u306e]|\ubd84\uc758 ?"
)
"""Han and Hangul numerals and decimal points that change the number before them, and fractions in words."""
_UNSPACED = re.compile(
    "[\u0e01-\u0e3a\u0e40-\u0e4f\u0e81-\u0ecf\u0f40-\u0fbc\u1000-\u103f\u1050-\u108f\u1780-\u17df\u3005-\u3007\u3041-\u318f"
    "\u31f0-\u31ff\u3400-\u9fff\ua000-\ua4cf\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af]+"
    "|(?<=[0-9])[\uac00-\ud7a3]+|[\uac00-\ud7a3]+(?=[-+\u2212]?[0-9])"
)
"""Letters of scripts that put no blanks between words (Thai, Lao, Tibetan, Burmese, Khmer, Kana, Han, Yi), and Hangul
beside digits. A line end replaces them, because a blank may separate thousands."""
_VULGAR = re.compile(r"(\d?)([\u00bc-\u00be\u2150-\u215e])", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'\u2019](?=\d{3}(?!\d))", re.ASCII)
_COMMANDS = (
    (re.compile(r"\\sqrt\s*(?:\[[^\[\]]*\])?|\\(?:[dtc]?frac|[dt]?binom)[^\n]{1,100}?\}\s*(?=\{)"), _ROOT),
    (re.compile(r"\\(?:pm|mp|neq?|not\s*=)(?![a-z])\s*"), _ROOT),
    (
        re.compile(
            r"\\(?:ln|lg|log|exp|(?:arc)?(?:sin|cos|tan|cot)h?|sec|csc)(?![a-z])\s*(?:_(?:\{\w+\}|\w)\s*)?(?:\\left)?\s*"
        ),
        _ROOT,
    ),
    (re.compile(r" ?\\(?:times|cdot|div)(?![a-z]) ?"), _TIMES),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*([A-Za-z/]+)\s*\}(?=\s*\^)"), r" \1"),
    (re.compile(r"\\pi(?![a-z])"), _PI),
    (re.compile(r"\{\\,\}|\\,"), ","),
    (re.compile(r"\\!|(?<=\d)\\[;: ](?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\(?:\$|(?:pounds|euro|yen)(?![a-z]) *)"), "$"),
)
"""LaTeX commands that are part of a number or change the value of the number after them, and their replacements.
Fractions that are not read as numbers, functions, plus-minus and not-equal are treated like roots."""
_FUNCTION = re.compile(r"\b(?:sqrt|cbrt|ln|log\d*|exp|sin|cos|tan)(?=\()|(?<!\d)!= *", re.ASCII)
_FACTORIAL = re.compile(r"(?<=\d)!+(?= ?[/^\u00d7\u00b7\u22c5\u00f7}$])", re.ASCII)
"""Exclamation mark in front of what does not follow a sentence."""
_PRODUCT = re.compile(r"(?:(?<=\d)|(?<=\d\)))(?=\([-+\u2212]?[.\d])", re.ASCII)
CURRENCY_CODES = "USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|CAD|AUD|KRW|Rs"
CURRENCY_SIGNS = "$\u00a2-\u00a5\u20a0-\u20c0"
_CURRENCY = re.compile(
    rf"(?<![\w)}}])(?<!\d )(?:(?<=[-+\u2212])(?:{CURRENCY_CODES})|[A-Z]{{0,3}}[{CURRENCY_SIGNS}]) ?(?=[-\u2212]?[.\d])",
    re.ASCII,
)
"""Currency before a number, which separates it from its sign or from an operator: -$5, 3 * US$5."""
_OPERATOR = re.compile(
    rf"(?:(?<=[0-9)}}])( *)[*xX+\u2212]\1|(?<=[\w)}}%\u00b0]) *[/^\u00b7\u22c5\u00f7{_TIMES}] *)"
    rf"(?=[-\u2212.0-9({{{_ROOT}])"
)
"""Operator before a number. Unequal spaces around some of them are rather those of a list or of Markdown."""
_SPACED_SIGN = re.compile(
    rf"([=(\[{{\u2248] *[-\u2212]|(?:^|[^\d)}}\]\s]) *\u2212) +(?=[.\d{CURRENCY_SIGNS}])", re.ASCII
)
_AFTER_ROOT = re.compile(rf"(?<={_ROOT})\s+(?=[-\u2212.0-9])")
_BRACKET = re.compile(rf"(?<=[-\u2212^{_ROOT}{_TIMES}])[({{]+(?=[-+\u2212]?[.0-9])")
_JOINING = frozenset(f".,:/^%+-\u2212\u00b0_{_ROOT}{_TIMES}")
"""Characters that join the characters around them into one token, which as a whole is a number or is not."""
_SPLIT = re.compile(r"(?<=[^\W\d])[.,:%]+(?=[-+\u2212]?\d)")
_NAME = re.compile(rf"[^\W\d](?!.*[/{_ROOT}{_TIMES}][-\u2212]?[.\d])")
"""Beginning of a name (H2O, covid-19) or unit (m/s^2), but not of an expression (x/5)."""
_LETTER = rf"[^\W\d_{_PI}\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f]"
_WORD = rf"(?![abeijknqruvwxyz](?!{_LETTER})){_LETTER}+"
_UNIT = re.compile(
    rf"(?:%|\u00b0{_LETTER}*|{_WORD})?(?:/{_WORD})*(?:(?:(?<=[ms])|(?<=ft|in|yd|mi))(?:[\u00b2\u00b3]|\^-?\d))?\Z"
)
"""Unit of a number: km/h, %/year, m^2. A single letter that is usually a variable (5x, 5e, 5k) is not a unit."""
_BEFORE_FRACTION = re.compile(r"(?:^|[^\w.,:/^%+\-\u2212\u00b0])([-+\u2212]?\d+) \Z", re.ASCII)
_POWER = re.compile(r"(?<=[\w)])\*\*(?=[\w(+-])|(?<=[\d)]) \*\* (?=[\d(])", re.ASCII)
_GROUP = re.compile(r"\d{3}(?![\d/])", re.ASCII)
_BEFORE_GROUP = re.compile(r"(?:^|[^\w.,:/^%+\-\u2212\u00b0])([-+\u2212]?\d{1,3}(?: \d{3})*) \Z", re.ASCII)
_MAX_LENGTH = 1000
"""Maximum number of characters of a number. Python refuses to parse more than 4,300 digits."""


def read_number(text: str) -> Fraction | None:
    """Parse the whole text as an exact number; return None if it is not a number or divides by zero."""
    match = _NUMBER.fullmatch(_normalized(text).strip()) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    sign, whole, above, below, decimal, exponent = match.groups()
    if decimal is None:
        divisor = int(below.replace(",", "").replace("\u2212", "-"))
        value = Fraction(int(above.replace(",", "")), divisor) + int(whole or 0) if divisor else None
    else:
        value = Fraction(decimal.replace(",", "").removesuffix("."))
        value *= Fraction(10) ** int((exponent or "0").replace("\u2212", "-"))
    return value if value is None or sign in ("", "+") else -value


def last_number(text: str) -> str | None:
    """Return the last number of a text as written; None if the last digits of the text are not part of a number.

    12:30, 2024-01-05, 10^6, 5-3, 60km/2h, 5x, 1,2345 and 1.2.3 are not numbers. Names such as H2O or covid-19 are
    skipped. A unit after a number (12km, 50%, 18km/h) is removed. Scripts without blanks between words separate numbers
    from words.
    """
    text = _normalized(text)
    if not text.isascii():
        text = _UNSPACED.sub("\n", _MULTIPLE.sub(_TIMES, text))
    # Each round either returns or cuts a name such as H2O off the end.
    while (last := max(map(text.rfind, "0123456789"))) >= 0:
        start, end = _token_around(text, last)
        parts = _SPLIT.split(text[start:end])
        while not any(digit in parts[-1] for digit in "0123456789"):
            parts.pop()
        part = parts[-1].rstrip(".,:/^+-\u2212_").lstrip(",:%\u00b0")
        if text[:start][-1:] not in tuple(")}]"):  # __18__ is Markdown, and (x)_5 is a name
            part = part.lstrip("_")
        if not _NAME.match(part):
            return _number_in(part, text[:start])
        text = text[:start] + " ".join(parts[:-1])
    return None


def _number_in(part: str, before: str) -> str | None:
    """Return the number in a part of a text without its unit; None if the part is not a number.

    Args:
        part: the part.
        before: the text before it. A whole number there belongs to a fraction in the part (1 1/2), and one of up to
            three digits to a group of three digits (1 000).
    """
    before = before[-_MAX_LENGTH:]
    if "/" in part and (whole := _BEFORE_FRACTION.search(before)):
        part = f"{whole[1]} {part}"
    elif _GROUP.match(part) and (groups := _BEFORE_GROUP.search(before)):
        part = groups[1].replace(" ", "") + part
    return next((form for form in (part, _UNIT.sub("", part)) if read_number(form) is not None), None)


def _token_around(text: str, position: int) -> tuple[int, int]:
    """Return start and end of the token that contains the digit at a position."""
    start = end = position
    lowest, highest = max(0, position - _MAX_LENGTH), min(len(text), position + _MAX_LENGTH)
    # Bounded, because a completion may be one token of a million digits.
    while start > lowest and (text[start - 1].isalnum() or text[start - 1] in _JOINING):
        start -= 1
    while end < highest and (text[end].isalnum() or text[end] in _JOINING):
        end += 1
    return start, end


def _normalized(text: str) -> str:
    """Return the text with fractions, signs, powers and thousands in plain notation, and operators without spaces."""
    if not text.isascii():
        # `_PLAIN` comes last: it makes other full-width commas separators, and the bar of a vulgar fraction a slash.
        text = _FULL_WIDTH_COMMA.sub(",", _VULGAR.sub(_vulgar, text)).translate(_PLAIN)
        text = _DIGIT.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    # Before `_PRODUCT`, which would read the 0.1(6) of 1/6 as a product.
    text = _REPEATING.sub(_repeating, text) if "." in text else text
    if "\\" in text:
        text = _FRAC.sub(_fraction, text)
        for pattern, plain in _COMMANDS:
            text = pattern.sub(plain, text)
    if "{" in text:
        text = text.replace("{,}", ",").replace("^{", "^").replace("_{", "_")
    if "(" in text or "!" in text:
        text = _PRODUCT.sub(_TIMES, _FACTORIAL.sub(_TIMES, _FUNCTION.sub(_ROOT, text)))
    # Only between operands: other pairs of asterisks are Markdown's bold type.
    text = _THOUSANDS.sub("", _POWER.sub("^", text) if "**" in text else text)
    text = _CURRENCY.sub("", _SPACED_SIGN.sub(r"\1", text))
    if not text.isascii():
        text = re.sub(rf" (?={_PI})", "", _AFTER_ROOT.sub("", text))
    # An operator joins its operands into one token, which is not a number: 12 + 7 is not 7.
    return _BRACKET.sub("", _OPERATOR.sub(lambda match: match[0] if match[0] in "/^+\u2212" else _TIMES, text))


def is_fraction(text: str) -> bool:
    """Return whether a number is written as a fraction, and not as a whole number or decimal."""
    return "/" in _normalized(text)


def _vulgar(match: re.Match[str]) -> str:
    whole, character = match.groups()
    return (f"{whole} " if whole else "") + unicodedata.normalize("NFKC", character)


def _fraction(match: re.Match[str]) -> str:
    sign, *signs, above, whole, below, other = (match[group] or "" for group in (1, 2, 5, 3, 4, 6, 7))
    # Two minus signs cancel: -\frac{-1}{2} is 1/2.
    minus = sum(map(bool, signs)) + (sign not in ("", "+"))
    joined = match.string[match.end() : match.end() + 1].isalpha()  # a unit, or a variable
    return f" {'-' * (minus % 2)}{above or whole}/{below or other}{' ' * (not joined)}"


def _repeating(match: re.Match[str]) -> str:
    sign, whole, digits, *repeated = match.groups("")
    period = "".join(repeated)
    # Python refuses to make an integer of more than 4,300 digits.
    if len(whole + digits + period) > _MAX_LENGTH:
        return match[0]
    above = int(whole + digits + period) - int(whole + digits)
    return f"{sign}{above}/{10 ** len(digits) * (10 ** len(period) - 1)}"
