"""Computes the warm start of a run into the cache: `python -m retrain.campaign.work.warmstart CONFIG`.

A campaign does this once, before its runs would all wait for the first of them to do it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from retrain.config.load import load
from retrain.errors import RetrainError


def main(file: str) -> None:
    """Compute it, unless it is in the cache."""
    from retrain.run.build import choose_device, initial_model

    loaded = load(file)
    initial_model(loaded, choose_device(loaded.config.training.device), _tell)


def _tell(event: str, details: Mapping[str, Any]) -> None:
    if event == "warmup":
        print(f"warm start {details['step']}/{details['steps']}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RetrainError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
