"""Hide secrets, by name and by value, in whatever is shown, sent or written down."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "(hidden)"
"""Stands for a value that looks secret."""

_SHORTEST = 8
"""Characters of a variable's value that is looked for in texts: a shorter one, as "none", is part of other words."""

_ANYWHERE = re.compile(
    "auth|authorization|bearer|cookies?|cred|dsns?|jwts?|oauth|otp|passwd|pwd|webhooks?"
    r"|\w*(?:credential|creds|passcode|passphrase|password|secret)s?"
    "|(?:access|api|app|auth|bot|csrf|db|deploy|encryption|gh|git|hf|hub|master|private|session|signing|ssh|user)"
    "(?:key|pass|token)s?"
)
_COMPOUND = re.compile(
    r"\b(access|api|deploy|encryption|hub|master|private|session|signing|ssh|subscription|account) (key|token)s?\b"
    r"|\b(bot|id|refresh|user) tokens?\b|\bconnection (string|url|uri)s?\b|\bhook (address|uri|url)s?\b"
)
_AT_END = re.compile("headers?|keys?|pass|pat|tokens?")
"""Words of other things, too: `pass_at`, `token_mean`. Under them only a text is secret, and no path."""
_ORDINARY = re.compile(
    "answer|begin|bos|cache|cls|column|control|data|end|eos|extra|field|fn|foreign|group|id|image|label|mask|max|min"
    "|new|num|pad|planning|primary|prompt|question|response|reward|sep|sort|special|start|stop|text|think|unk"
)
"""Words in front of them that say which piece of text, or which column it is: `stop_tokens`, `answer_key`."""
_FORMAT = {"b", "base", "bytes", "content", "der", "hex", "material", "pem", "plain", "raw", "str", "string", "text"}
"""Last words that say how a secret is written: `key_pem`, `token_base64`."""
_BOUNDARY = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])")
_PATH = re.compile(r"\.{0,2}/|~")

_QUOTE = r"""\\{0,8}["']"""
_CHAR = r"""(?:[^"'\\]|\\+(?!["'\\]))"""
_OF_LINE = rf"(?![\r\n]){_CHAR}"
"""Any character but a quotation mark and the backslashes before one: what is hidden leaves JSON as JSON."""
# Repetitions are bounded where a text of an attacker could make them quadratic.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|(?:sk|rk)[-_](?:[A-Za-z0-9]{20,}|(?=[\w-]{0,99}[0-9A-Z])[\w-]{12,})"
    r"|gh[opsur]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|gl(?:agent|cbt|dt|ft|imt|oas|pat|ptt|rt|soat)-[\w-]{12,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|gsk_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{30,}"
    r"|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{20,}|AGE-SECRET-KEY-1[0-9A-Z]{20,}|GOCSPX-[\w-]{12,}|whsec_[\w+/=]{12,}"
    r"|shp(?:at|ca|pa|ss)_[A-Za-z0-9]{12,}|SG\.[\w-]{12,}\.[\w-]{12,}|hv[bs]\.[\w-]{12,}|ya29\.[\w-]{12,}"
    r"|tskey-[a-z]+-[\w-]{12,}"
    r"|eyJ[\w-]{4,400}\.eyJ[\w.-]+"
    rf"|-----BEGIN [A-Z ]{{0,30}}PRIVATE KEY-----{_CHAR}*?(?:-----END [A-Z ]{{0,30}}PRIVATE KEY-----|(?!{_CHAR}))"
    r")"
)
"""Keys and tokens that services mark by how they begin."""
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|private-token|[\w-]{0,40}(?:api-?key|auth-token|access-token))"
    rf"({_QUOTE}?[ ]?:[ ]?{_QUOTE}?)(?!\s){_OF_LINE}+"
)
"""A header with its value, as in `Authorization: Bearer ...`."""
_SCHEME = re.compile(
    r"\b((?i:bearer:?)\s+)(?!authenti|authori)[\w.~+/=-]{8,}"
    r"|\b((?:ApiKey|JWT|Token)\s+)(?=[A-Za-z._-]{0,99}[0-9])[\w.~+/=-]{12,}"
    r"|\b((?i:basic)\s+)(?=[A-Za-z+/]{0,99}[0-9A-Z=])[\w+/-]{12,}={0,2}"
)
_NAME = re.compile(
    rf"([?&;#]|--|\b)([A-Za-z][\w.-]{{0,80}})"
    rf"(?:{_QUOTE}?[ ]?(?:=|%3[dD])[ ]?{_QUOTE}?|{_QUOTE}[ ]?:[ ]?{_QUOTE}|(:[ ]?|[ ]))"
)
"""Text before a value in an address, an assignment or JSON: `?token=`, `password = `, `"api_key": "`.

The third group separates words of prose as well: `password: `, `--api-key `. See `_TYPED`."""
_TYPED = re.compile(r"(?=\S{0,99}[0-9])(?=\S{0,99}[A-Za-z])[^\s,;)]{6}")
"""The beginning of what is rather a password than a word or a number."""
_RANDOM = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{24,}(?![A-Za-z0-9])")
_OF_ONE_KIND = re.compile("[0-9]+|[A-Z]+|[a-z]+")
_VALUE = re.compile(rf"(?![&;#,<>\s]){_CHAR}(?:(?![&;#,<>\s]){_CHAR})*")
_OF_ADDRESS = {"code", "hmac", "jwt", "key", "sid", "sig", "signature", "token"}
"""Last words of parameters of an address that give access."""
_USER = re.compile(r"""(?<=://)[^/?#\s"<>]+@""")
_WEBHOOK = re.compile(
    r"""(https?://(?:[^\s/"'<>]{0,99}hooks?\.[^\s/"'<>]{1,99}/|[^\s"'<>]{1,200}/(?:web)?hooks?/))[^\s"'<>\\]+"""
)
_BOT = re.compile(r"(?<=/bot)[0-9]+:[\w-]+")

_named: set[str] = set()
"""Environment variables that a configuration or an option names as holders of secrets."""


def secret_from(variable: str) -> str:
    """Return the secret in an environment variable, without surrounding whitespace; "" if it is not set.

    From then on `masked` hides it, whatever the variable is called.
    """
    _named.add(variable)
    return os.environ.get(variable, "").strip()


def hide_named(value: Any) -> None:
    """Have `masked` hide the environment variables that a configuration names under keys that end in `_env`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and _words(key)[1:][-1:] == ("env",):
                _named.update(name for name in (item if isinstance(item, list) else [item]) if isinstance(name, str))
            hide_named(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            hide_named(item)


def looks_secret(name: str) -> bool:
    """Return true for a name of a secret, by its words: `api_key`, `hubToken`, `SMTP_PASS_2`; not `max_tokens`.

    A name that ends in `_env` names an environment variable that holds the secret, and is not secret itself.
    """
    return _secrecy(name) > 0


def masked(value: Any) -> Any:
    """Return a copy of a text or a configuration with HIDDEN in place of every secret.

    A secret is a value under a name that looks secret, the value of an environment variable whose name does or that
    `hide_named` was given, and in any text: a token with a known beginning, what follows `Bearer` or `?token=`, user
    and password of an address (`https://user:password@host`), and the address of a webhook. Switches, empty texts and
    null stay, and so do numbers and paths under names that other things have, too.
    """
    return _masked(value, 0)


def literal_secrets(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the places of a document where `masked` hides something."""
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
    """Return 2 for a name that only a secret has, 1 for one that other things have, too, and 0 for any other."""
    words = [*_words(name)]
    if not words or words[-1] == "env":
        return 0
    if any(map(_ANYWHERE.fullmatch, words)) or _COMPOUND.search(" ".join(words)):
        return 2
    while len(words) > 1 and words[-1] in _FORMAT:
        words.pop()
    ordinary = len(words) > 1 and (words[-1] == "tokens" or _ORDINARY.fullmatch(words[-2]))  # tokens of text
    return 1 if _AT_END.fullmatch(words[-1]) and not ordinary else 0


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
    for known in _in_environment():
        text = text.replace(known, HIDDEN)
    if "://" in text:
        text = _BOT.sub(HIDDEN, _WEBHOOK.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text)))
    text = _SCHEME.sub(rf"\1\2\3{HIDDEN}", text)
    if "=" in text or ":" in text or "--" in text or "%3" in text:
        text = _without_assigned(_HEADER.sub(rf"\1\2{HIDDEN}", text))
    return _RANDOM.sub(_unless_word, _KNOWN.sub(HIDDEN, text))


def _unless_word(found: re.Match[str]) -> str:
    """Hide a run of letters and digits that changes between them as often as one drawn at random."""
    text = found[0]
    changes, digits = len(_OF_ONE_KIND.findall(text)), sum(map(str.isdigit, text))
    mixed = not text.islower() and not text.isupper()
    return HIDDEN if mixed and digits > 2 and 2 * changes >= len(text) else text


def _without_assigned(text: str) -> str:
    """Hide the values of assignments to secrets; a value may itself hold further assignments."""
    shown, end = list[str](), 0
    for found in _NAME.finditer(text):
        start, name, prose = found.groups()
        if found.start() < end or (prose and not _is_given(start, prose, text, found.end())):
            continue
        secrecy = _of_assigned(start, name)
        value = _VALUE.match(text, found.end()) if secrecy else None
        if value:
            number = secrecy == 1 and value[0].replace(".", "", 1).isdecimal()
            shown += text[end : found.end()], value[0] if number else HIDDEN
            end = value.end()
    return "".join([*shown, text[end:]])


def _is_given(start: str, prose: str, text: str, end: int) -> bool:
    """Return true if a name before a colon, or an option before a space, is followed by what looks like a secret."""
    return (":" in prose or start == "--") and _TYPED.match(text, end) is not None


def _of_assigned(start: str, name: str) -> int:
    """Return `_secrecy` of a name in front of `=`: in an address more names are secret, elsewhere `key=` is not."""
    words, secrecy = _words(name), _secrecy(name)
    address = start in ("?", "&", ";", "#") and start
    gives_access = words[-1] in _OF_ADDRESS if address else secrecy == 2 or (secrecy == 1 and words[-1] == "token")
    return max(secrecy, 1) if gives_access or secrecy == 2 else 0


def _in_environment() -> Iterable[str]:
    """Return what the secrets of the environment look like in texts, the longest first."""
    return _forms(tuple(value for name, value in os.environ.items() if name in _named or looks_secret(name)))


@lru_cache(8)
def _forms(values: tuple[str, ...]) -> list[str]:
    """Return the lines of the values as they are, as Python and JSON write them, and as an address does."""
    lines = {line.strip() for value in values if not _is_path(value) for line in value.splitlines()}
    found = {form for line in lines for form in (line, repr(line)[1:-1], json.dumps(line)[1:-1], quote(line, safe=""))}
    return sorted((form for form in found if len(form) >= _SHORTEST), key=len, reverse=True)


def _is_path(value: str) -> bool:
    """Return true for the path of a file or socket that holds the secret, as in SSH_AUTH_SOCK."""
    return os.path.isabs(value) and os.path.exists(value)
