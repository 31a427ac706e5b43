"""The declaration of a campaign's primary comparison: what it fixes, when it was made, and what changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.campaign.plan.load_campaign import LoadedCampaign, free_tables
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.plan.plan_file import PLAN, REPORT, Declared, LooksDeclared, Plan, jobs, read_plan
from retrain.config.positions import leaves
from retrain.config.resolve import LoadedConfig

_ROLES = ("baseline", "primary")
_HASH = "sha256"
_SHOWN = 5
"""Largest number of changes that the sentence lists; plan.json and JSON output have all of them."""
_LONGEST = 60
"""Largest number of characters of a value in a change."""


@dataclass(frozen=True)
class Declaration:
    """A declaration, as reports show it.

    Attributes:
        primary: label of the declared condition; None if the declaration was withdrawn.
        baseline: label of the condition that it is compared with.
        claim: task of the comparison; None in a campaign without tasks.
        at: time of the declaration, ISO 8601 in UTC.
        started, runs: number of runs that had started by then, and of all runs.
        sha256: hash of the campaign's file at that time.
        changed: changes of the declaration since the first run had started.
    """

    primary: str | None
    baseline: str
    claim: str | None
    at: str
    started: int
    runs: int
    sha256: str
    changed: tuple[str, ...]

    @property
    def late(self) -> bool:
        """True if runs had started before, so the comparison has no test of its own."""
        return self.started > 0

    @property
    def sentence(self) -> str:
        """Sentences for a report: the comparison, the time, the runs that had started, and the changes."""
        comparison = f"{self.primary} against {self.baseline}{f' on {self.claim}' if self.claim else ''}"
        record = f"(sha256 of the file: {self.sha256[:12]})"
        if not self.late:
            begun = f"before any run had started {record}"
            return f"The primary comparison, {comparison}, was declared at {self.at}, {begun}."
        when = f"at {self.at}, after {self.started} of {self.runs} runs had started {record}"
        shown = [*self.changed[:_SHOWN], *["..."] * (len(self.changed) > _SHOWN)]
        changes = f" Changed since runs had started: {', '.join(shown)}." if self.changed else ""
        if self.primary is None:
            return f"The declaration of a primary comparison was withdrawn {when}.{changes}"
        return (
            f"The primary comparison, {comparison}, was declared late, {when}. "
            f"It is therefore corrected like the other comparisons.{changes}"
        )

    def facts(self) -> dict[str, Any]:
        """Return the declaration as JSON data, with `late` and the sentence."""
        return {**asdict(self), "late": self.late, "sentence": self.sentence}


def declaration(plan: Plan) -> Declaration | None:
    """Return the declaration of a campaign's primary comparison; None if none was declared."""
    found = plan.declared
    if found is None:
        return None
    return Declaration(
        primary=plan.primary,
        baseline=plan.baseline or plan.cells[0].method,
        claim=plan.claim,
        at=found["at"],
        started=found["after"],
        runs=found["runs"],
        sha256=found["sha256"],
        changed=tuple(found.get("changed", ())),
    )


def declare(path: Path, loaded: LoadedCampaign) -> Declared | None:
    """Return the declaration of a campaign for its plan; call this before the plan is written.

    A declaration keeps its time while its terms are the same. A change before the first run has started replaces it.
    A later change, also a withdrawal, makes a new declaration that lists all changes since then.

    Args:
        path: directory of the campaign, with the earlier plan if there is one.
        loaded: the campaign.
    Returns:
        None if no comparison is declared, and none was declared when the first run started.
    """
    before = read_plan(path).declared if (path / PLAN).exists() else None
    started = _started(path)
    terms = _terms(loaded)
    if loaded.settings.primary is None:
        if before is None or not started:
            return None
        terms = {**before["terms"], "primary": None, "claim": None}
    if before and before["terms"] == (terms := _as_before(before["terms"], terms)):
        return before
    return Declared(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        after=len(started),
        runs=len(started | {job.id for job in jobs(loaded)}),
        sha256=hashlib.sha256(loaded.text.encode()).hexdigest(),
        terms=terms,
        changed=_history(before, terms) if before and started else [],
    )


def declare_looks(path: Path, loaded: LoadedCampaign) -> LooksDeclared | None:
    """Return the declaration of a campaign's looks for its plan; call this before the plan is written.

    A change of the looks or of the number of seeds, also a withdrawal, makes a new declaration.

    Args:
        path: directory of the campaign, with the earlier plan if there is one.
        loaded: the campaign.
    Returns:
        None if the campaign has no looks, and had none when the first run started.
    """
    before = read_plan(path) if (path / PLAN).exists() else None
    sizes = loaded.settings.look_sizes
    if before and before.look_sizes == sizes:
        return before.looks_declared
    started = _started(path)
    if not sizes and not started:
        return None
    return LooksDeclared(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        after=len(started),
        runs=len(started | {job.id for job in jobs(loaded)}),
    )


def seeds_reported(path: Path, loaded: LoadedCampaign) -> int | None:
    """Return the number of seeds of a report after which seeds are added to a campaign without looks; None without.

    Adding seeds until a difference is significant claims differences falsely in 11 to 18 of 100 campaigns.

    Args:
        path: directory of the campaign, with the earlier plan and report if there are any.
        loaded: the campaign.
    """
    if not (path / PLAN).exists():
        return None
    before = read_plan(path)
    added = set(loaded.settings.seed_list) - set(before.seed_list)
    if before.seeds_reported is None and added and not before.look_sizes and (path / REPORT).exists():
        return len(before.seed_list)
    return before.seeds_reported


def _started(path: Path) -> set[str]:
    """Return CONDITION/sSEED of every run that a worker has taken or that has written files of its own.

    Runs of earlier plans count as well, because their results may have been seen.
    """
    written = [*path.glob("cells/*/*/config.resolved.json"), *path.glob("cells/*/*/outcome.json")]
    return {f"{file.parent.parent.name}/{file.parent.name}" for file in (*written, *path.glob("leases/*/*/*.json"))}


def _terms(loaded: LoadedCampaign) -> dict[str, Any]:
    """Return all settings that decide what the declared comparison tests, as JSON data.

    These are the labels, the level, the seeds, looks and warm starts, the tasks, the outcomes unless accuracy is the
    only one, and the configuration of both conditions without the tables that do not affect results. A key has the
    value that the file gives it, and the hash is of the configuration with its defaults. Seeds are part of it, because
    adding seeds after a look at results is optional stopping.
    """
    settings = loaded.settings
    labels = {"baseline": loaded.baseline, "primary": settings.primary}
    terms: dict[str, Any] = {**labels, "claim": settings.claim, "alpha": settings.alpha}
    terms |= {"seeds": settings.seed_list, "warm_starts": settings.warm_starts, "tasks": settings.tasks}
    if settings.measured != (Outcome(),):  # left out otherwise, so that older declarations keep their time
        terms["outcomes"] = [one.model_dump() for one in settings.measured]
    if settings.look_sizes:
        terms["looks"] = settings.look_sizes
    for role, label in labels.items():
        for one, config in zip(loaded.conditions, loaded.configs, strict=True):
            if one.method == label and one.task in ("", settings.claim):
                terms[f"{role} {_HASH}"] = _hash(config)
                terms |= {f"{role}: {key}": value for key, value in _configuration(loaded, one).items()}
    return json.loads(json.dumps(terms, default=str))


def _configuration(loaded: LoadedCampaign, condition: Any) -> dict[str, Any]:
    """Return the configuration of a condition's runs without their seed: dotted key -> value."""
    data = loaded.cell_config(condition, loaded.settings.seed_list[0])
    data["training"]["seed"] = condition.seed_offset
    return {".".join(map(str, path)): value for path, value in leaves(data) if path[0] not in free_tables()}


def _hash(config: LoadedConfig) -> str:
    """Return a hash of a configuration with its defaults, without the tables that do not affect results."""
    bound = {one.component.table for found in config.components.bound.values() for one in found}
    free = {*free_tables(), *bound}  # what a table of a bound component sets is among the component's parameters
    facts = {name: table for name, table in config.resolved().items() if name not in free}
    facts["components"].pop("tracker", None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _as_before(old: Mapping[str, Any], terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms; a configuration that is only written differently, as with defaults, has its keys of before."""
    found = dict(terms)
    for role in _ROLES:
        if old.get(f"{role} {_HASH}") == terms.get(f"{role} {_HASH}"):
            found = {key: value for key, value in found.items() if not key.startswith(f"{role}: ")}
            found |= {key: value for key, value in old.items() if key.startswith(f"{role}: ")}
    return found


def _history(before: Declared, terms: Mapping[str, Any]) -> list[str]:
    """Return the changes of the earlier declaration and those from it to `terms`."""
    old = before["terms"]
    moved = old.get("claim") != terms.get("claim")  # to another task, whose settings differ in many keys
    relabelled = [f"{role}: " for role in _ROLES if moved or old.get(role) != terms.get(role)]
    keys = [key for key in dict.fromkeys((*old, *terms)) if not key.startswith(tuple(relabelled))]
    keys = [key for key in keys if not key.endswith(_HASH)]
    found = [
        f"{key} {_shown(old.get(key))} -> {_shown(terms.get(key))}" for key in keys if old.get(key) != terms.get(key)
    ]
    return [*before.get("changed", ()), *found]


def _shown(value: Any) -> str:
    """Format a value of a change, cut after 60 characters."""
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
