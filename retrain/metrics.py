"""Registry of the metrics that a step reports: meaning, unit, and how to read each. The rows are in metrics.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tomli


@dataclass(frozen=True)
class Metric:
    """A metric, or several whose names differ in a placeholder such as `{loss}`.

    Attributes:
        name: name in metrics.jsonl.
        meaning, unit, when, reading, title, first, uses, keys: see metrics.toml.
        group: part of the documentation's list: "rollouts", "update", "engine" or "components".
    """

    name: str
    meaning: str
    unit: str = ""
    when: str = ""
    reading: str = ""
    title: str = ""
    first: bool = False
    uses: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    group: str = "components"

    def matches(self, name: str) -> bool:
        """Return True if `name` is this metric, or has any text in place of a placeholder."""
        words = re.split(r"\{\w+\}", self.name)
        # A placeholder stands for the name of a component, which may contain a slash but is never empty.
        return re.fullmatch(".+".join(map(re.escape, words)), name) is not None


@cache
def metrics() -> Mapping[str, Metric]:
    """Return the metrics of the package by name, in the order of the documentation."""
    groups = tomli.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    rows = ((group, name, row) for group, named in groups.items() for name, row in named.items())
    return {
        name: Metric(name, group=group, uses=tuple(row.pop("uses", ())), keys=tuple(row.pop("keys", ())), **row)
        for group, name, row in rows
    }


def find_metric(name: str) -> Metric | None:
    """Return the metric with a name as in metrics.jsonl, such as `loss/kl`; a name without placeholder goes first."""
    by_name = metrics()
    # Exact names first: `loss/kl` is also matched by `loss/{loss}`.
    return by_name.get(name) or next((metric for metric in by_name.values() if metric.matches(name)), None)
