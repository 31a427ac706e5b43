"""Mask secrets in everything that is displayed, sent or stored, by the one rule of `masked`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "(hidden)"
"""Replacement for a secret."""

_MIN_LENGTH = 8
"""Minimum length of a variable's value that is masked in texts. Shorter values, such as "none", are ordinary words."""
_SECRET_WORD = re.compile(
    r"auth|authorization|bearer|cookies?|creds?|dsn|jwt|oauth|otp|passwd|pwd|webhook"
    r"|\w*(?:credential|passphrase|password|secret)s?|(?:access|api|auth|private)(?:key|token)s?"
)
"""Words that only names of secrets contain, at any position."""
_LAST_WORD = re.compile("headers?|keys?|pass|pat|psk|pw|token")
"""Last words of the name of a secret. `tokens` is not one of them: it counts or lists tokens of text."""
_HARMLESS_QUALIFIER = re.compile(
    "answer|bos|cache|cls|column|control|data|end|eos|extra|field|foreign|group|id|image|label|mask|num|pad|planning"
    "|primary|prompt|question|response|reward|sep|sort|special|start|stop|text|think|unk"
)
"""Words before a `_LAST_WORD` that show that the name is not a secret's: `stop_token`, `answer_key`."""
_BOUNDARY = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])")
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
            if isinstance(key, str) and _words(key)[1:][-1:] == ["env"]:
                named = item if isinstance(item, list) else [item]
                _variables.update(name for name in named if isinstance(name, str))
            hide_named(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            hide_named(item)


@lru_cache(4096)
def looks_secret(name: str) -> bool:
    """Return whether a name looks like that of a secret: `api_key`, `hubToken`, `SMTP_PASS_2`, but not `max_tokens`.

    A key that ends in `_env` holds the name of an environment variable, which is not secret.
    """
    words = _words(name)
    if not words or words[-1] == "env":
        return False
    if any(map(_SECRET_WORD.fullmatch, words)):
        return True
    harmless = len(words) > 1 and _HARMLESS_QUALIFIER.fullmatch(words[-2])
    return bool(_LAST_WORD.fullmatch(words[-1])) and not harmless


def masked(value: Any) -> Any:
    """Return a copy of a text or a configuration with HIDDEN in place of every secret.

    Secrets are:
    - in every text, values of environment variables whose name looks secret or was passed to `secret_from` or
      `hide_named`;
    - in a configuration, whole values under a key whose name looks secret;
    - user and password in a URL (`https://user:password@host`).

    A text is not searched for secrets that it names itself, such as `password = "a b"`: no pattern finds them all.
    Booleans, empty texts and None stay.
    """
    return _masked(value, hidden=False)


def literal_secrets(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the key paths of the values of a document in which `masked` hides something."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    secrets: list[tuple[str | int, ...]] = []
    for key, item in items:
        hidden = looks_secret(str(key))
        if (hidden or isinstance(item, str)) and _masked(item, hidden) != item:
            secrets.append((*path, key))
        else:
            secrets += literal_secrets(item, (*path, key))
    return secrets


def _words(name: str) -> list[str]:
    return [word.lower() for word in _BOUNDARY.split(name) if word]


def _masked(value: Any, hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(item, hidden or looks_secret(str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, hidden) for item in value]
    # These hold no secret, and a report of "no key set" is worth reading.
    if value is None or value == "" or isinstance(value, bool):
        return value
    if hidden:
        return HIDDEN
    return _masked_text(value) if isinstance(value, str) else value


def _masked_text(text: str) -> str:
    secrets = tuple(value for name, value in os.environ.items() if name in _variables or looks_secret(name))
    for secret in _spellings(secrets):
        text = text.replace(secret, HIDDEN)
    return _USER.sub(f"{HIDDEN}@", text) if "://" in text else text


@lru_cache(8)
def _spellings(values: tuple[str, ...]) -> list[str]:
    """Return every line of the values as it is, and escaped as in Python, JSON and a URL, the longest first."""
    # The path of a file, as in SSH_AUTH_SOCK, is not the secret itself.
    lines = {line.strip() for value in values if not _is_file(value) for line in value.splitlines()}
    spellings = {
        spelling
        for line in lines
        for spelling in (line, repr(line)[1:-1], json.dumps(line)[1:-1], quote(line, safe=""), quote_plus(line))
    }
    # The longest first: a secret that contains another would be replaced in part only.
    return sorted((spelling for spelling in spellings if len(spelling) >= _MIN_LENGTH), key=len, reverse=True)


def _is_file(value: str) -> bool:
    return os.path.isabs(value) and os.path.exists(value)
