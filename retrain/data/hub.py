"""Tasks from data sets of the Hugging Face hub, or of a local directory of the same layout."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from retrain.data.rows import BAD_ROWS, RowTask
from retrain.errors import DataError
from retrain.registry import task
from retrain.system.extras import library
from retrain.system.records import Rows


@task("hub", extra=("datasets", "hub"), when={**BAD_ROWS, "heldout_fraction": ("heldout_split", (None,))})
@dataclass
class Hub(RowTask):
    """Rows of a data set (extra `hub`); what is in the local cache needs no network.

    Args:
        seed: of the order of every epoch.
        name: of the data set, or a local directory.
        split: to train on; heldout_split: to evaluate on; a training row with one of its prompts is bad.
        config: which of its configurations; revision: commit, tag or branch; pin a commit to stay reproducible.
        heldout_fraction: share of `split` to hold out where there is no `heldout_split`.
        shuffle: a new order for every epoch.
    """

    _: KW_ONLY
    name: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    heldout_split: str | None = None

    def __post_init__(self) -> None:
        contents = [self.name, self.config, self.revision, self.split]
        data = self._load(self.split)
        contents += [data._fingerprint, self.heldout_split, self.heldout_fraction]
        heldout = None
        if self.heldout_split is not None:
            other = self._load(self.heldout_split)
            contents.append(other._fingerprint)
            heldout = self._rows(other, self.heldout_split), self.name
        self.divide(self._rows(data, self.split), self.name, heldout)
        self.sign("hub", contents)

    def _load(self, split: str) -> Any:
        datasets = library("datasets", "hub")
        try:
            return datasets.load_dataset(self.name, self.config, split=split, revision=self.revision)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise DataError(
                f"data set {self.name}, split {split}: {reason}; check [hub] name, config, split and revision, "
                "and without a network that the data set is in the cache"
            ) from error

    def _rows(self, data: Any, split: str) -> Rows:
        return ((f"{self.name}/{split}:{number}", row) for number, row in enumerate(data, start=1))
