"""Which names look like those of secrets, and how what they name is hidden before it is shown or sent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "(hidden)"
"""Stands for a value that looks secret."""

_WORD = re.compile(
    "apikey|auth|authorization|bearer|cookie|credentials?|keys?|pass|passphrase|passwd|password|pat|pwd|secrets?|token"
)
_BOUNDARY = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_USER = re.compile(r"(?<=://)[^/@\s]+@")


def looks_secret(name: str) -> bool:
    """Whether one of the words of a name is that of a secret: `api_key`, `hubToken`, `SMTP_PASS`; not `max_tokens`.

    A name that ends in `_env` names an environment variable that holds the secret, and is not secret itself.
    """
    words = [word.lower() for word in _BOUNDARY.split(name)]
    return words[-1] != "env" and any(map(_WORD.fullmatch, words))


def masked(value: Any, secret: bool = False) -> Any:
    """A copy of a configuration with HIDDEN in place of every value under a name that looks secret.

    The user and password of an address (`https://user:password@host`) are hidden wherever they are. Switches, empty
    texts and null stay: they are no secrets.

    Args:
        secret: the value itself stands under such a name.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, secret or looks_secret(str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, secret) for item in value]
    if secret and value not in (None, "", True, False):
        return HIDDEN
    return _USER.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def literal_secrets(value: Any, path: tuple[str | int, ...] = ()) -> Iterable[tuple[str | int, ...]]:
    """The places of a document where `masked` hides something."""
    if isinstance(value, Mapping):
        items = list[tuple[Any, Any]](value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        items = []
    for key, item in items:
        if (looks_secret(str(key)) and masked(item, True) != item) or (isinstance(item, str) and masked(item) != item):
            yield (*path, key)
        else:
            yield from literal_secrets(item, (*path, key))
