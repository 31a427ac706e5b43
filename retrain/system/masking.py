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
# Repetitions are bounded so that a malicious text cannot cause quadratic run time.
_NAME = re.compile(rf"\b([A-Za-z][\w.-]{{0,80}})(?:{_QUOTE}?[ ]?=[ ]?{_QUOTE}?|{_QUOTE}[ ]?:[ ]?{_QUOTE})")
"""Name and separator before a value in a URL, an assignment or JSON: `?token=`, `password = `, `"api_key": "`."""
_VALUE = re.compile(rf"(?![&;#,<>\s]){_CHAR}(?:(?![&;#,<>\s]){_CHAR})*")
_USER = re.compile(r"""(?<=://)[^/?#\s"<>]+@""")

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
    - values that a text assigns to such a name: `--set judge.api_key=...`, `?token=...`;
    - user and password in a URL (`https://user:password@host`).

    A secret that a text holds under no name, and that is in no such variable, is not recognized.
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
    text = _USER.sub(f"{HIDDEN}@", text) if "://" in text else text
    return _mask_assignments(text) if "=" in text or ":" in text else text


def _mask_assignments(text: str) -> str:
    """Mask the values of assignments to secrets. A value that is not masked may contain further assignments."""
    shown, end = list[str](), 0
    for found in _NAME.finditer(text):
        # `key=`, `header=` and `pass=` are common in code; a number after `token=` is the id of a token of text.
        secrecy = _secrecy(found[1])
        secrecy = secrecy if secrecy == 2 or _words(found[1])[-1] == "token" else 0
        value = _VALUE.match(text, found.end()) if secrecy and found.start() >= end else None
        if value and not (secrecy == 1 and value[0].replace(".", "", 1).isdecimal()):
            shown += text[end : found.end()], HIDDEN
            end = value.end()
    return "".join([*shown, text[end:]])


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
