"""Which names look like those of secrets, and how their values are hidden before they are shown or sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
"""Stands for a value that looks secret."""

_ANYWHERE = re.compile("apikey|auth|authorization|bearer|cookie|credentials?|passphrase|passwd|password|pwd|secrets?")
_AT_END = re.compile("keys?|pass|pat|token")
"""Words of other things, too: `pass_at`, `token_mean`."""
_BOUNDARY = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])")
_USER = re.compile(r"(?<=://)[^/@\s]+@")


def looks_secret(name: str) -> bool:
    """Whether a name is that of a secret, by its words: `api_key`, `hubToken`, `SMTP_PASS_2`; not `max_tokens`.

    A name that ends in `_env` names an environment variable that holds the secret, and is not secret itself.
    """
    words = [word.lower() for word in _BOUNDARY.split(name) if word] or [""]
    return words[-1] != "env" and (any(map(_ANYWHERE.fullmatch, words)) or bool(_AT_END.fullmatch(words[-1])))


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


def literal_secrets(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The places of a document where `masked` hides something."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[str | int, ...]] = []
    for key, item in items:
        secret = looks_secret(str(key))
        if (secret or isinstance(item, str)) and masked(item, secret) != item:
            found.append((*path, key))
        else:
            found += literal_secrets(item, (*path, key))
    return found
