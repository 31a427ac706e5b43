"""Tasks from data sets of the Hugging Face hub, or of a local directory of the same layout."""

from __future__ import annotations

import importlib
from typing import Any

from retrain.data.rows import (
    BAD_ROWS,
    Fraction,
    OnBadRow,
    Reading,
    RowTask,
    digest_of,
    in_hash_order,
    prompt_hash,
    read_problems,
)
from retrain.data.rows import split as divide
from retrain.errors import DataError, MissingExtraError
from retrain.registry import task
from retrain.system.records import Rows


@task("hub", extra=("datasets", "hub"), when={**BAD_ROWS, "heldout_fraction": ("heldout_split", (None,))})
class Hub(RowTask):
    """Rows of a data set (extra `hub`); what is in the local cache needs no network.

    Args:
        seed: of the order of every epoch.
        name: of the data set, or a local directory.
        split: to train on; heldout_split: to evaluate on; a training row with one of its prompts is bad.
        config: which of its configurations; revision: commit, tag or branch; pin a commit to stay reproducible.
        heldout_fraction: share of `split` to hold out where there is no `heldout_split`.
        prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction: see `Reading`.
        shuffle: a new order for every epoch.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        seed: int,
        *,
        name: str,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        heldout_split: str | None = None,
        heldout_fraction: Fraction = 0.1,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        solution_field: str = "solution",
        id_field: str = "id",
        on_bad_row: OnBadRow = "error",
        max_bad_fraction: Fraction = 0.01,
        shuffle: bool = True,
    ) -> None:
        reading = Reading(prompt_field, answer_field, solution_field, id_field, on_bad_row, max_bad_fraction)
        data = _load(name, config, split, revision)
        contents = [name, config, revision, split, data._fingerprint, heldout_split, heldout_fraction]
        if heldout_split is None:
            train, held = divide(read_problems(_rows(data, f"{name}/{split}"), name, reading), heldout_fraction, name)
        else:
            other = _load(name, config, heldout_split, revision)
            contents.append(other._fingerprint)
            held = in_hash_order(read_problems(_rows(other, f"{name}/{heldout_split}"), name, reading))
            rows = _rows(data, f"{name}/{split}")
            train = read_problems(rows, name, reading, frozenset(map(prompt_hash, held)))
        super().__init__(seed, train, held, digest_of("hub", vars(reading), shuffle, contents), shuffle)


def _load(name: str, config: str | None, split: str, revision: str | None) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError("datasets", "hub") from error
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise DataError(
            f"data set {name}, split {split}: {reason}; check [hub] name, config, split and revision, "
            "and without a network that the data set is in the cache"
        ) from error


def _rows(data: Any, place: str) -> Rows:
    return ((f"{place}:{number}", row) for number, row in enumerate(data, start=1))
