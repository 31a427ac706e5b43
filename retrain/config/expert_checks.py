"""What `[expert]` and the loss terms demand of each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from retrain.algorithms.graph.objective import source_of
from retrain.config.document import Document
from retrain.config.schema import Config
from retrain.registry import Bound


def check_expert(config: Config, document: Document, terms: Sequence[Bound]) -> None:
    """Record what keeps expert rows from being trained on.

    Args:
        terms: of the loss, in the order of the configuration.
    """
    sources = {source_of(term): index for index, term in enumerate(terms) if term.params["weight"] != 0}
    if "expert" in sources:
        _check_file(config, document, terms[sources["expert"]].name, sources["expert"])
        _check_room(config, document)
    elif config.expert.path is not None:
        fix = 'add [[loss]] name = "sft", or remove the table'
        document.warn(("expert",), "no loss term trains on expert rows", fix)


def _check_file(config: Config, document: Document, term: str, index: int) -> None:
    path = config.expert.path
    if path is None:
        document.refuse(
            ("loss", index, "name"),
            f'"{term}" trains on expert rows, and no file is named that has them',
            'add [expert] path = "FILE.jsonl"; `retrain task export` writes one for a task with worked solutions',
        )
    elif not Path(path).is_file():
        document.refuse(("expert", "path"), f'there is no file "{path}"', "check the path; it is relative to here")
    elif not path.endswith((".jsonl", ".parquet")):
        document.refuse(("expert", "path"), f'"{path}" is neither .jsonl nor .parquet', "convert or rename it")
    elif path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
        document.refuse(("expert", "path"), "pyarrow is not installed", 'pip install "retrain[parquet]"')


def _check_room(config: Config, document: Document) -> None:
    """Group-relative advantages need at least one prompt beside the expert's rows."""
    batch, group = config.training.batch_size, config.training.group_size
    prompts, rows = config.division(expert=True)
    if prompts < 1:
        most = int((1 - 1 / batch) * 1000) / 1000
        document.refuse(
            ("expert", "ratio"),
            f"{rows} of {batch * group} rows are an expert's: no room for a prompt with {group} completions",
            f"use a ratio of at most {most:g}" if batch > 1 else "raise [training] batch_size",
        )
