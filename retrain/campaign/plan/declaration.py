"""The declaration of a campaign's primary comparison: what it fixes, when it was made, and its earlier files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.campaign.plan.load_campaign import LoadedCampaign, free_tables
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.plan.plan_file import FILE, PLAN, REPORT, Declared, LooksDeclared, Plan, jobs, read_plan
from retrain.config.loaded_config import LoadedConfig
from retrain.system.files import write_text


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
        earlier: names of the campaign's files of earlier declarations, if runs had started by then.
    """

    primary: str | None
    baseline: str
    claim: str | None
    at: str
    started: int
    runs: int
    sha256: str
    earlier: tuple[str, ...]

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
        changes = f" Earlier files of the campaign: {', '.join(self.earlier)}." if self.earlier else ""
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
    declared = plan.declared
    if declared is None:
        return None
    return Declaration(
        primary=plan.primary,
        baseline=plan.baseline or plan.cells[0].method,
        claim=plan.claim,
        at=declared["at"],
        started=declared["after"],
        runs=declared["runs"],
        sha256=declared["sha256"],
        earlier=tuple(declared.get("earlier", ())),
    )


def history(path: Path, loaded: LoadedCampaign) -> dict[str, Any]:
    """Return the values of `Plan` that depend on the campaign's earlier plan; call this before the plan is written.

    Args:
        path: directory of the campaign, with the earlier plan and report if there are any.
        loaded: the campaign.
    """
    before = read_plan(path) if (path / PLAN).exists() else None
    started = _started(path)
    runs = len(started | {job.id for job in jobs(loaded)})
    now = LooksDeclared(at=datetime.now(UTC).isoformat(timespec="seconds"), after=len(started), runs=runs)
    return {
        "declared": _declared(path, before, now, loaded),
        "looks_declared": _looks_declared(before, now, loaded),
        "seeds_reported": _seeds_reported(path, before, loaded),
        "removed": _removed(before, started, loaded),
    }


def _declared(path: Path, before: Plan | None, now: LooksDeclared, loaded: LoadedCampaign) -> Declared | None:
    """Return the declaration of the primary comparison; None if there is none, and was none at the first start.

    A declaration keeps its time while its terms are the same. A change before the first run has started replaces it.
    A later change, also a withdrawal, makes a new declaration, and a copy of the campaign's earlier file is kept.
    """
    declared = before.declared if before else None
    terms = _terms(loaded)
    # Version 0.3 also recorded every key of the configurations, `baseline: training.max_steps`; the hashes cover them.
    terms_before = {key: value for key, value in declared["terms"].items() if ": " not in key} if declared else {}
    if loaded.settings.primary is None:
        if declared is None or not now["after"]:
            return None
        terms = {**terms_before, "primary": None, "claim": None}
    if declared and terms_before == terms:
        return declared
    earlier: list[str] = []
    if declared and now["after"]:
        earlier = [*declared.get("earlier", ()), f"campaign-before-{len(declared.get('earlier', ())) + 1}.toml"]
        write_text(path / earlier[-1], (path / FILE).read_text(encoding="utf-8"))
    sha256 = hashlib.sha256(loaded.text.encode()).hexdigest()
    return Declared(**now, sha256=sha256, terms=terms, earlier=earlier)


def _looks_declared(before: Plan | None, now: LooksDeclared, loaded: LoadedCampaign) -> LooksDeclared | None:
    """Return the declaration of the looks; None if there are none, and were none when the first run started.

    A change of the looks or of the number of seeds, also a withdrawal, makes a new declaration.
    """
    sizes = loaded.settings.look_sizes
    if before and before.look_sizes == sizes:
        return before.looks_declared
    return now if sizes or now["after"] else None


def _seeds_reported(path: Path, before: Plan | None, loaded: LoadedCampaign) -> int | None:
    """Return the number of seeds of a report after which seeds are added to a campaign without looks; None without.

    Adding seeds until a difference is significant claims differences falsely in 11 to 18 of 100 campaigns.
    """
    if before is None:
        return None
    changed = set(loaded.settings.seed_list) != set(before.seed_list)
    if before.seeds_reported is None and changed and not before.look_sizes and (path / REPORT).exists():
        return len(before.seed_list)
    return before.seeds_reported


def _removed(before: Plan | None, started: set[str], loaded: LoadedCampaign) -> list[str]:
    """Return the labels of conditions that are not in the file any more, although runs of theirs had started.

    The correction counts the conditions of the file: without a bad one the others need less evidence.
    """
    if before is None:
        return []
    labels = [*before.removed, *(cell.method for cell in before.cells if cell.id in started)]
    return sorted({*labels} - {condition.method for condition in loaded.conditions})


def _started(path: Path) -> set[str]:
    """Return CONDITION/sSEED of every run that a worker has taken or that has written files of its own.

    Runs of earlier plans count as well, because their results may have been seen.
    """
    written = [*path.glob("cells/*/*/config.resolved.json"), *path.glob("cells/*/*/outcome.json")]
    return {f"{file.parent.parent.name}/{file.parent.name}" for file in (*written, *path.glob("leases/*/*/*.json"))}


def _terms(loaded: LoadedCampaign) -> dict[str, Any]:
    """Return all settings that decide what the declared comparison tests, as JSON data.

    These are the labels, the level, the seeds, looks and warm starts, the tasks, the outcomes unless accuracy is the
    only one, and hashes of both conditions' configurations. Seeds are part of it, because adding seeds after a look at
    results is optional stopping.
    """
    settings = loaded.settings
    labels = {"baseline": loaded.baseline, "primary": settings.primary}
    terms: dict[str, Any] = {**labels, "claim": settings.claim, "alpha": settings.alpha}
    terms |= {"seeds": settings.seed_list, "warm_starts": settings.warm_starts, "tasks": settings.tasks}
    if settings.all_outcomes != (Outcome(),):  # left out otherwise, so that older declarations keep their time
        terms["outcomes"] = [outcome.model_dump() for outcome in settings.all_outcomes]
    if settings.look_sizes:
        terms["looks"] = settings.look_sizes
    for role, label in labels.items():
        for condition, config in zip(loaded.conditions, loaded.configs, strict=True):
            if condition.method == label and condition.task in ("", settings.claim):
                terms[f"{role} sha256"] = _hash(config)
    return json.loads(json.dumps(terms, default=str))


def _hash(config: LoadedConfig) -> str:
    """Return a hash of a configuration with its defaults, without the tables that do not affect results."""
    # What these tables set is among the parameters of their components.
    of_components = {component.table for component in config.slots.values()}
    free = {*free_tables(), *of_components}
    facts = {name: table for name, table in config.resolved().items() if name not in free}
    facts["components"].pop("tracker", None)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
