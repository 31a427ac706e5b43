"""Mask secrets, recognized by name or by value, in everything that is displayed, sent or stored."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "(hidden)"
"""Replacement for a value that looks secret."""

_MIN_LENGTH = 8
"""Minimum length of a variable's value that is masked in texts. Shorter values, such as "none", are ordinary words."""

_SECRET_WORD = re.compile(
    "auth|authorization|bearer|cookies?|cred|dsns?|jwts?|mnemonic|oauth|otp|passwd|pwd|webhooks?"
    r"|\w*(?:credential|creds|passcode|passphrase|password|secret)s?"
    "|(?:access|api|app|auth|bot|csrf|db|deploy|encryption|gh|git|hf|hub|master|private|session|signing|ssh|user)"
    "(?:key|pass|token)s?"
)
"""Words that only names of secrets contain, at any position."""
_SECRET_PHRASE = re.compile(
    r"\b(access|api|deploy|encryption|hub|master|private|session|signing|ssh|subscription|account) (key|token)s?\b"
    r"|\b(bot|id|refresh|user) tokens?\b|\bconn(ection)? (str|string|url|uri)s?\b|\bhook (address|uri|url)s?\b"
    r"|\b(recovery|seed) (code|phrase)s?\b|\bid (dsa|ecdsa|ed|rsa)\b"
)
"""Sequences of words that only names of secrets contain."""
_SECRET_LAST_WORD = re.compile("headers?|keys?|pass|pat|psk|pw|tokens?")
"""Last words of a secret's name that other names have as well, such as `stop_token`. Of their values only texts that
are not paths are masked."""
_HARMLESS_QUALIFIER = re.compile(
    "answer|begin|bos|cache|cls|column|control|data|end|eos|extra|field|fn|foreign|group|id|image|label|mask|max|min"
    "|new|num|pad|planning|primary|prompt|question|response|reward|sep|sort|special|start|stop|text|think|unk"
)
"""Words before a `_SECRET_LAST_WORD` that show that the name is not a secret's: `stop_token`, `answer_key`."""
_FORMATS = {"b", "base", "bytes", "content", "der", "hex", "material", "pem", "plain", "raw", "str", "string", "text"}
"""Last words that name the format of a secret: `key_pem`, `token_base64`."""
_BOUNDARY = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])")
_PATH = re.compile(r"\.{0,2}/|~")

_QUOTE = r"""\\{0,8}["']"""
_CHAR = r"""(?:[^"'\\]|\\+(?!["'\\]))"""
"""Any character except a quotation mark and the backslashes before one, so that masked JSON remains valid."""
_CHAR_IN_LINE = rf"(?![\r\n]){_CHAR}"
# Repetitions are bounded so that a malicious text cannot cause quadratic run time.
_KNOWN_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|(?:sk|rk)[-_](?:[A-Za-z0-9]{20,}|(?=[\w-]{0,99}[0-9A-Z])[\w-]{12,})"
    r"|gh[opsur]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|gl(?:agent|cbt|dt|ft|imt|oas|pat|ptt|rt|soat)-[\w-]{12,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|gsk_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{30,}"
    r"|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{20,}|AGE-SECRET-KEY-1[0-9A-Z]{20,}|GOCSPX-[\w-]{12,}|whsec_[\w+/=]{12,}"
    r"|shp(?:at|ca|pa|ss)_[A-Za-z0-9]{12,}|SG\.[\w-]{12,}\.[\w-]{12,}|hv[bs]\.[\w-]{12,}|ya29\.[\w-]{12,}"
    r"|tskey-[a-z]+-[\w-]{12,}|(?:pplx|tvly|xai)-[\w-]{20,}|key-[0-9a-f]{32}|dckr_pat_[\w-]{20,}|fig[dou]_[\w-]{20,}"
    r"|lsv2_[a-z]{2}_\w{20,}|sntry[su]_[\w+/=]{12,}|lin_api_\w{20,}|ATATT3[\w-]{20,}"
    r"|eyJ[\w-]{4,400}\.eyJ[\w.-]+"
    rf"|-----BEGIN [A-Z ]{{0,30}}PRIVATE KEY-----{_CHAR}*?(?:-----END [A-Z ]{{0,30}}PRIVATE KEY-----|(?!{_CHAR}))"
    r")"
)
"""Keys and tokens that have a known prefix."""
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|private-token|[\w-]{0,40}(?:api-?key|auth-token|access-token))"
    rf"({_QUOTE}?[ ]?:[ ]?{_QUOTE}?)(?!\s){_CHAR_IN_LINE}+"
)
"""HTTP header with its value: `Authorization: Bearer ...`."""
_SCHEME = re.compile(
    r"\b((?i:bearer:?)\s+)(?!authenti|authori)[\w.~+/=-]{8,}"
    r"|\b((?:ApiKey|JWT|Token)\s+)(?=[A-Za-z._-]{0,99}[0-9])[\w.~+/=-]{12,}"
    r"|\b((?i:basic)\s+)(?=[A-Za-z+/]{0,99}[0-9A-Z=])[\w+/-]{12,}={0,2}"
)
"""Authentication scheme with its credentials: `Bearer ...`, `Token ...`, `Basic ...`."""
_NAME = re.compile(
    rf"([?&;#]|--|\b)([A-Za-z][\w.-]{{0,80}})"
    rf"(?:{_QUOTE}?[ ]?(?:=|%3[dD])[ ]?{_QUOTE}?|{_QUOTE}[ ]?:[ ]?{_QUOTE}|(:[ ]?|[ ]))"
)
"""Name and separator before a value in a URL, an assignment or JSON: `?token=`, `password = `, `"api_key": "`.

The third group is a separator that occurs in prose as well: `password: `, `--api-key `. After it a value is masked only
if it begins with `_PASSWORD_LIKE`."""
_PASSWORD_LIKE = re.compile(r"(?=\S{0,99}[0-9])(?=\S{0,99}[A-Za-z])[^\s,;)]{6}")
"""Beginning of a text that has both letters and digits, and is thus more likely a password than a word or number."""
_RANDOM = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{24,}(?![A-Za-z0-9])")
_RUN_OF_ONE_CLASS = re.compile("[0-9]+|[A-Z]+|[a-z]+")
_VALUE = re.compile(rf"(?![&;#,<>\s]){_CHAR}(?:(?![&;#,<>\s]){_CHAR})*")
_URL_PARAMETERS = {"code", "hmac", "jwt", "key", "sid", "sig", "signature", "token"}
"""Last words of the names of URL parameters that grant access."""
_USER = re.compile(r"""(?<=://)[^/?#\s"<>]+@""")
_WEBHOOK = re.compile(
    r"""(https?://(?:[^\s/"'<>]{0,99}hooks?\.[^\s/"'<>]{1,99}/|[^\s"'<>]{1,200}/(?:web)?hooks?/))[^\s"'<>\\]+"""
)
_BOT = re.compile(r"(?<=/bot)[0-9]+:[\w-]+")

_variables: set[str] = set()
"""Names of environment variables that hold secrets according to a configuration or a command-line option."""


def secret_from(variable: str) -> str:
    """Return the secret in an environment variable, without surrounding whitespace; "" if it is not set.

    From then on `masked` hides its value, whatever the name of the variable.
    """
    _variables.add(variable)
    return os.environ.get(variable, "").strip()


def hide_named(value: Any) -> None:
    """Make `masked` hide the values of environment variables that a configuration names under keys ending in `_env`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and _words(key)[1:][-1:] == ("env",):
                _variables.update(
                    name for name in (item if isinstance(item, list) else [item]) if isinstance(name, str)
                )
            hide_named(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            hide_named(item)


def looks_secret(name: str) -> bool:
    """Return whether a name looks like that of a secret: `api_key`, `hubToken`, `SMTP_PASS_2`, but not `max_tokens`.

    A key that ends in `_env` holds the name of an environment variable, which is not secret.
    """
    return _secrecy(name) > 0


def masked(value: Any) -> Any:
    """Return a copy of a text or a configuration with HIDDEN in place of every secret.

    Secrets are:
    - values under a name that looks secret;
    - values of environment variables whose name looks secret or was passed to `secret_from` or `hide_named`;
    - tokens with a known prefix, and texts of mixed letters and digits that look random;
    - values after `Bearer`, `?token=` and the like;
    - user and password in a URL (`https://user:password@host`);
    - URLs of webhooks.

    Booleans, empty texts and None stay. Numbers and paths stay under names that are not used for secrets only, such as
    `key`.
    """
    return _masked(value, 0)


def literal_secrets(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the key paths of the values of a document in which `masked` hides something."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[str | int, ...]] = []
    for key, item in items:
        secrecy = _secrecy(str(key))
        if (secrecy or isinstance(item, str)) and _masked(item, secrecy) != item:
            found.append((*path, key))
        else:
            found += literal_secrets(item, (*path, key))
    return found


@lru_cache(4096)
def _secrecy(name: str) -> int:
    """Return 2 for a name that only secrets have, 1 for an ambiguous name, and 0 for any other name."""
    words = [*_words(name)]
    if not words or words[-1] == "env":
        return 0
    if any(map(_SECRET_WORD.fullmatch, words)) or _SECRET_PHRASE.search(" ".join(words)):
        return 2
    while len(words) > 1 and words[-1] in _FORMATS:
        words.pop()
    # `..._tokens` counts or lists tokens of text.
    harmless = len(words) > 1 and (words[-1] == "tokens" or _HARMLESS_QUALIFIER.fullmatch(words[-2]))
    return 1 if _SECRET_LAST_WORD.fullmatch(words[-1]) and not harmless else 0


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _BOUNDARY.split(name) if word)


def _masked(value: Any, secrecy: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(item, max(secrecy, _secrecy(str(key)))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, secrecy) for item in value]
    if value in (None, "", True, False):
        return value
    if not isinstance(value, str):
        return HIDDEN if secrecy == 2 else value
    return HIDDEN if secrecy == 2 or (secrecy and not _PATH.match(value)) else _masked_text(value)


def _masked_text(text: str) -> str:
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _BOT.sub(HIDDEN, _WEBHOOK.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text)))
    text = _SCHEME.sub(rf"\1\2\3{HIDDEN}", text)
    if "=" in text or ":" in text or "--" in text or "%3" in text:
        text = _mask_assignments(_HEADER.sub(rf"\1\2{HIDDEN}", text))
    return _RANDOM.sub(_mask_if_random, _KNOWN_TOKEN.sub(HIDDEN, text))


def _mask_if_random(found: re.Match[str]) -> str:
    """Return HIDDEN for letters and digits that alternate as often as in a random text, else the text itself."""
    text = found[0]
    changes, digits = len(_RUN_OF_ONE_CLASS.findall(text)), sum(map(str.isdigit, text))
    mixed = not text.islower() and not text.isupper()
    return HIDDEN if mixed and digits > 2 and 2 * changes >= len(text) else text


def _mask_assignments(text: str) -> str:
    """Mask the values of assignments to secrets. A value that is not masked may contain further assignments."""
    shown, end = list[str](), 0
    for found in _NAME.finditer(text):
        start, name, prose = found.groups()
        if found.start() < end or (prose and not _value_follows(start, prose, text, found.end())):
            continue
        secrecy = _assigned_secrecy(start, name)
        value = _VALUE.match(text, found.end()) if secrecy else None
        if value:
            number = secrecy == 1 and value[0].replace(".", "", 1).isdecimal()
            shown += text[end : found.end()], value[0] if number else HIDDEN
            end = value.end()
    return "".join([*shown, text[end:]])


def _value_follows(start: str, prose: str, text: str, end: int) -> bool:
    """Return whether a name with a colon, or an option with a space, is followed by a text that looks like a password.

    Args:
        start: text before the name, such as "?" or "--".
        prose: the separator after the name: a colon or a space.
        text: the whole text.
        end: index in the text after the separator.
    """
    return (":" in prose or start == "--") and _PASSWORD_LIKE.match(text, end) is not None


def _assigned_secrecy(start: str, name: str) -> int:
    """Return the `_secrecy` of a name before a value: in a URL more names are secret, elsewhere `key=` is not."""
    words, secrecy = _words(name), _secrecy(name)
    in_url = start in ("?", "&", ";", "#") and start
    gives_access = words[-1] in _URL_PARAMETERS if in_url else secrecy == 2 or (secrecy == 1 and words[-1] == "token")
    return max(secrecy, 1) if gives_access or secrecy == 2 else 0


def _environment_secrets() -> Iterable[str]:
    """Return the secrets in environment variables in all their spellings, the longest first."""
    return _spellings(tuple(value for name, value in os.environ.items() if name in _variables or looks_secret(name)))


@lru_cache(8)
def _spellings(values: tuple[str, ...]) -> list[str]:
    """Return every line of the values as it is, escaped as in Python, JSON and a URL, and in base64."""
    lines = {line.strip() for value in values if not _is_path(value) for line in value.splitlines()}
    found = {
        form
        for line in lines
        for form in (
            line,
            repr(line)[1:-1],
            json.dumps(line)[1:-1],
            quote(line, safe=""),
            quote_plus(line),
            _base64(line),
        )
    }
    return sorted((form for form in found if len(form) >= _MIN_LENGTH), key=len, reverse=True)


def _base64(line: str) -> str:
    return (
        base64.b64encode(line.encode(errors="surrogateescape")).decode().rstrip("=") if len(line) >= _MIN_LENGTH else ""
    )


def _is_path(value: str) -> bool:
    """Return whether a value is the path of an existing file, as in SSH_AUTH_SOCK, and so not a secret itself."""
    return os.path.isabs(value) and os.path.exists(value)
