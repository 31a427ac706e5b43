r"""Decoration of a number in an answer: fonts, spacing, brackets, currency, degrees, percent signs and units.

    answer = {currency | sign} number [percent] {unit} [percent]
    unit   = \text{...} or another font with words, a symbol (cm, km/h), a word after a blank, a degree sign or a
             currency; each with an exponent or without, and a fraction bar between two of them

Words that change the value are not units: "million", "dozen", "or".
"""

from __future__ import annotations

import re
from fractions import Fraction

from retrain.functional.numbers import CURRENCY_CODES, CURRENCY_SIGNS, read_number

_MAX_LENGTH = 500
"""Maximum number of characters of an answer that is searched for decoration."""
_FONT = (
    r"\\(?:math(?:bf|rm|it|sf|tt|bb|cal|normal)|text(?:bf|it|rm|sf|tt|sc|up|md|normal)?|boldsymbol|bm|mbox|hbox|fbox"
    r"|emph|underline|operatorname)\s*"
)
_SIZE = re.compile(
    r"\\(?:(?:display|text|script|scriptscript)style|centering|tiny|scriptsize|footnotesize|small|normalsize"
    r"|large|Large|LARGE|huge|Huge)(?![A-Za-z])"
)
_STYLE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|bf|rm|it|tt|sf|limits)(?![A-Za-z])")
_SPACE = re.compile(
    r"\\[()\[\]]|(?<!\d)\\[,;: ]|\\[,;: ](?!\d{3}(?!\d))|~"
    r"|\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])|\\(?:[hv]space\*?|[hv]?phantom|tag\*?|label)\{[^{}]*\}"
)
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_IN_FONT = re.compile(_FONT + r"\{((?:[^{}]|\{[^{}]*\})*)\}")
_PERCENT = re.compile(rf"\\%|{_FONT}\{{\s*per ?cent\s*\}}|\bper ?cent\b")
_CODE = re.compile(
    rf"{_FONT}\{{\s*(?:{CURRENCY_CODES}|\\?[{CURRENCY_SIGNS}])\.?\s*\}}"
    rf"|(?<![A-Za-z])(?:(?:{CURRENCY_CODES})(?![A-Za-z])\.?|[A-Z]{{1,3}}(?=\\?[{CURRENCY_SIGNS}]))"
)
_BRACKETS = re.compile(r"\(([^()]*)\)|\{((?:[^{}]|\{[^{}]*\})*)\}")
_CURRENCY = rf"(?:\\?[{CURRENCY_SIGNS}]|\\(?:pounds|euro|yen|textdollar|textsterling|texteuro)(?![A-Za-z]))"
_NOT_A_UNIT = (
    r"(?:or|and|not|to|pi|mod|sqrt|times|plus|minus|over|hundred|thousand|[mbtr]+illion|dozen|hal(?:f|ves)|thirds?"
    r"|quarters?)\b"
)
_CHANGES = "[\u5341\u767e\u5343\u842c\u4e07\u5104\u4ebf\u5146\u534a\u6210\u6253\u5c0d\u5bf9\u53cc\u96d9\u6216\u548c]"
"""Han characters that change the value of the number before them (ten thousand, half, dozen, pair), and or, and."""
_SYMBOL = (
    r"(?<![A-Za-z])(?:[mckdn]m|[km]?g|lbs?|oz|ft|in|yds?|mi|mph|km/?h|k?J|k?W|k?V|k?N|Hz|Pa|m[lL]|m?s|sec|min|hrs?"
    r"|(?<=[\s/])[mshglL])(?![A-Za-z])"
)
_WORDS = rf"{_FONT}\{{(?![^{{}}]*(?:\b{_NOT_A_UNIT}|{_CHANGES}))(?:[^{{}}\d\\$=<>]|\^-?\d)*\}}"
_UNIT = (
    rf"(?:{_WORDS}|\\[dtc]?frac\{{{_WORDS}\}}\{{{_WORDS}\}}|{_SYMBOL}"
    rf"|(?<=\s)(?!{_NOT_A_UNIT})[A-Za-z]{{3,}}(?![A-Za-z])|{_CURRENCY}"
    rf"|(?:(?!{_CHANGES})[\u3400-\u9fff])+"
    r"|(?:\^\s*\{?\s*)?\\(?:circ|degrees?|textdegree)(?![A-Za-z])\s*\}?\s*[CF]?(?![A-Za-z])|\u00b0[CF]?(?![A-Za-z]))"
    r"(?:\s*\^\s*(?:-?\d|\{\s*-?\d\s*\})|[\u00b2\u00b3])?"
)
_DECORATED = re.compile(
    rf"(?:{_CURRENCY}| )*([-+\u2212]?)(?:{_CURRENCY}| )*((?:[\d.]|\\[dtc]?frac)[^$]*?)"
    rf" ?(%)?(?: ?(?:[/\u00b7.] ?)?{_UNIT})* ?(%)?[ .,;:]*"
)
_ENDS = re.compile(r"\A(?:\$|\s)+|(?:\\\\(?:\[[^\[\]]*\])?|\\newline(?![A-Za-z])|\\?[,;:]|\\ |(?<!\.)\.|\s|\$)+\Z")
"""Dollar signs, blanks and punctuation at the ends of an answer, and line breaks after it."""


def undecorated(text: str) -> str:
    r"""Return the number of an answer as written, without decoration; another answer without currency signs.

    A percent sign is kept, as a final `%`. Dollar signs around an answer, `\$` anywhere in it, size commands, and
    punctuation and line breaks after it are removed.
    """
    if len(text) > _MAX_LENGTH:
        return text
    # Size commands go first, because they may follow the punctuation at the end.
    ended = _ENDS.sub("", _SIZE.sub("", text))
    plain = _CODE.sub("$", _STYLE.sub("", _COLOR.sub("", _PERCENT.sub("%", ended))))
    plain = _SPACE.sub(" ", plain).replace(r"\!", "")
    # Fonts and brackets may be nested.
    while (inside := _IN_FONT.sub(_unwrap_digits, plain)) != plain:
        plain = inside
    plain = " ".join(plain.split())
    while inner := _BRACKETS.fullmatch(plain):
        plain = (inner[1] or inner[2] or "").strip()
    if match := _DECORATED.fullmatch(plain):
        sign, number, percent, last = match.groups()
        number = sign + number.strip()
        if read_number(number) is not None:
            # Kept, because 50% and 50 are different answers.
            return number + ("%" if percent or last else "")
    return _ENDS.sub("", ended.replace(r"\$", ""))


def _unwrap_digits(match: re.Match[str]) -> str:
    """Return the content of a font command if it contains digits: `\\mathbf{18}` is a number, `\\text{cm}` a unit."""
    return f" {match[1]} " if re.search(r"\d", match[1]) else match[0]


def decorated_number(text: str) -> Fraction | None:
    """Return the number of an undecorated answer, without its percent sign; None if it is not a number."""
    return read_number(text.removesuffix("%"))
