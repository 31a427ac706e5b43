"""Test whether a file is a campaign, without importing the schema of campaigns."""

from __future__ import annotations

from pathlib import Path

from retrain.config.document import read
from retrain.errors import ConfigError

SECTION = "campaign"
"""The table that makes a file a campaign."""


def is_campaign(file: Path | str) -> bool:
    """Return True if the file is TOML with a `[campaign]` table.

    A file that cannot be read or parsed gives False; `load` then reports the error.
    """
    try:
        return SECTION in read(file).data
    except ConfigError:
        return False
