"""What a campaign would cost and could tell, before it is run: `retrain campaign FILE --dry-run`."""

from __future__ import annotations

import math
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import variance
from typing import Any

import tomli_w

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.plan.plan_file import PLAN
from retrain.campaign.verdict.analysis import accuracy, differences
from retrain.campaign.verdict.results import read_campaign
from retrain.campaign.verdict.statistics import detectable_effect, smallest_p
from retrain.campaign.work.campaign_worker import machine_slots
from retrain.campaign.work.run_process import finish, reason, train, warm_start
from retrain.config.schema import Config
from retrain.errors import RetrainError
from retrain.report.page import duration
from retrain.storage.run_files import read_rows
from retrain.system.masking import masked
from retrain.system.process import Process

_PROBE_STEPS = 2


def preview(loaded: LoadedCampaign, probe: bool) -> dict[str, Any]:
    """Facts by name, JSON-able.

    Args:
        probe: run two steps of the first condition, to estimate the time and the accuracy.
    Raises:
        RetrainError: the probe failed, with the exit code of its run.
    """
    seeds, config = loaded.settings.seed_list, loaded.configs[0].config
    variables = machine_slots(loaded.settings.slots, loaded.settings.ranks)
    runs, slots = len(seeds) * len(loaded.conditions), len(variables)
    comparisons = len(loaded.conditions) - max(1, len(loaded.settings.tasks))
    first = loaded.cell_config(loaded.conditions[0], seeds[0])
    spent, reached = _probe(first, config, loaded.settings.ranks, variables[0]) if probe else ({}, None)
    facts: dict[str, Any] = {
        "campaign": str(loaded.directory),
        "conditions": {condition.label: masked(dict(condition.overrides)) for condition in loaded.conditions},
        "baseline": loaded.baseline,
        "seeds": seeds,
        "runs": runs,
        "steps": sum(one.config.training.max_steps for one in loaded.configs) * len(seeds),
        "evaluation": f"{config.eval.problems} held-out problems every {config.eval.every} steps",
        "executor": f"{loaded.executor.name}, {slots} at a time on this machine",
        "power": power(len(seeds), comparisons, loaded.settings.alpha, spread(loaded, reached)),
    }
    if probe:
        facts["time"] = spent | {"campaign_s": math.ceil(runs / slots) * spent["run_s"]}
    return facts


def measured(document: dict[str, Any], config: Config, ranks: int) -> dict[str, str]:
    """Time and memory of one run in words, from two steps that are really made; raises as `preview` does."""
    spent, _ = _probe(document, config, ranks)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return {
        "run": f"about {duration(spent['run_s'])}, the warm start aside: {_parts(spent)}",
        "warm_start": f"{duration(spent['warm_start_s'])}, now in the cache",
        "memory": f"{peak:,.0f} MB in the largest process at its peak; that of a GPU is not in it",
    }


def _parts(spent: Mapping[str, float]) -> str:
    steps = f"{spent['start_s']:.0f} s start, {spent['step_s']:.2f} s per step"
    return f"{steps}, {spent['evaluation_s']:.1f} s per evaluation"


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds of the paired difference in accuracy, and where it is known from."""

    sd: float
    source: str


def spread(loaded: LoadedCampaign, reached: float | None = None) -> Spread | None:
    """Measured in the campaign's finished runs; without two pairs of them, what the held-out problems alone give.

    sd = sqrt(2 p (1 - p) / problems), the binomial error of two evaluations; None if nothing is evaluated.

    Args:
        reached: accuracy p of the probe; without one, or at 0 or 1, p = 0.5, with which the error is greatest.
    """
    if measured := _measured(loaded):
        return measured
    problems = loaded.configs[0].config.eval.problems
    if not problems:
        return None
    rate, origin = (reached, "the probe's") if reached is not None and 0 < reached < 1 else (0.5, "the worst")
    source = f"assumed: the binomial error of two evaluations of {problems} problems at {origin} accuracy {rate:.2g}"
    return Spread(math.sqrt(2 * rate * (1 - rate) / problems), f"{source}; seeds that differ in more add to it")


def _measured(loaded: LoadedCampaign) -> Spread | None:
    """Pooled over the comparisons that have two complete pairs or more."""
    if not (loaded.directory / PLAN).exists():
        return None
    found: list[list[float]] = []
    for results in (read_campaign(loaded.directory, task) for task in loaded.settings.tasks or ("",)):
        against = [(label, results.baseline) for label in results.conditions if label != results.baseline]
        found += [differences(results.pairs(*pair), accuracy) for pair in results.ladder or against]
    found = [values for values in found if len(values) > 1]
    squares = sum(variance(values) * (len(values) - 1) for values in found)
    pairs = sum(map(len, found))
    # Differences that are all equal are too few to have a spread.
    if not squares:
        return None
    return Spread(math.sqrt(squares / (pairs - len(found))), f"measured in {pairs} pairs of finished runs")


def power(seeds: int, comparisons: int, alpha: float, known: Spread | None) -> list[str]:
    """What so many paired seeds can tell, in sentences."""
    least, comparisons = smallest_p(seeds), max(1, comparisons)
    lines = [f"with {seeds} paired seeds the smallest possible p-value is {least:.4g}"]
    if least > alpha / comparisons:
        needed = math.ceil(1 - math.log2(alpha / comparisons))
        above = f"that is above {alpha:g} / {comparisons} comparisons: no difference can be significant"
        return [*lines, f"{above}; use at least {needed} seeds"]
    effect = detectable_effect(seeds, 1.0, alpha=alpha / comparisons)
    found = f"a true difference of {effect:.3g} standard deviations (of the paired difference) is found with"
    lines.append(f"{found} probability 0.8, at the level {alpha:g} / {comparisons}")
    if known is not None:
        spread = f"a standard deviation of {100 * known.sd:.1f} points ({known.source})"
        lines.append(f"that is {100 * effect * known.sd:.1f} points of accuracy, with {spread}")
    return lines


def _probe(
    document: dict[str, Any], config: Config, ranks: int, slot: Mapping[str, str] | None = None
) -> tuple[dict[str, float], float | None]:
    """Seconds of a run's parts and of the whole, from two steps that are really made, and the accuracy after them.

    Args:
        slot: environment variables of a campaign's slot; None: the run is a process like that of `retrain train`.
    """
    alone = slot is None
    with tempfile.TemporaryDirectory(prefix="retrain-probe-") as name:
        run = Path(name) / "probe"
        run.mkdir()
        document.setdefault("training", {})["max_steps"] = _PROBE_STEPS
        document.setdefault("logging", {}).update(dir=name, name=run.name, trackers=[])
        (run / "config.toml").write_text(tomli_w.dumps(document), encoding="utf-8")
        # Not a waste: the run or the campaign finds the warm start in the cache.
        warm = _timed(run, lambda: warm_start(run, run / "log.txt", alone))
        wall = _timed(run, lambda: train(run, ranks, slot or {}, alone))
        metrics, evals = read_rows(run / "metrics.jsonl"), read_rows(run / "eval.jsonl")
    evaluations = [float(row["time/evaluation_s"]) for row in evals]
    steps = [float(row["time/step_s"]) for row in metrics]
    start, each = wall - sum(steps) - sum(evaluations), max(evaluations, default=0.0)
    count, every = config.training.max_steps, config.eval.every
    times = (2 + ((count - 1) // every if every else 0)) if count else 1
    seconds = {
        "warm_start_s": warm,
        "start_s": start,
        "step_s": steps[-1],
        "evaluation_s": each,
        "run_s": start + count * steps[-1] + times * each,
    }
    return seconds, float(evals[-1]["accuracy"]) if evals else None


def _timed(run: Path, start: Callable[[], Process]) -> float:
    """Seconds that a process of the run takes, whose output goes to its log."""
    began = time.monotonic()
    if code := finish(start()):
        text = (run / "log.txt").read_text(encoding="utf-8", errors="replace")
        error = RetrainError(f"the probe failed: {reason(run, code)}\n{text[-2000:]}")
        error.exit_code = code if code > 0 else 128 - code
        raise error
    return time.monotonic() - began


def render(facts: Mapping[str, Any]) -> str:
    """The facts as text."""
    width = max(len(label) for label in facts["conditions"])
    lines = [f"{facts['campaign']}: {len(facts['conditions'])} conditions x {len(facts['seeds'])} seeds"]
    for label, overrides in facts["conditions"].items():
        mark = "  (baseline)" if label.rpartition(": ")[2] == facts["baseline"] else ""
        lines.append(f"  {label:<{width}}  {', '.join(f'{key}={value}' for key, value in overrides.items())}{mark}")
    lines += [
        f"seeds       {', '.join(map(str, facts['seeds']))}",
        f"runs        {facts['runs']}, {facts['steps']} steps in all; {facts['executor']}",
        f"evaluation  {facts['evaluation']}",
        *(f"power       {line}" for line in facts["power"]),
    ]
    if spent := facts.get("time"):
        run = f"{duration(spent['run_s'])} per run, of which {_parts(spent)}"
        lines.append(f"time        about {duration(spent['campaign_s'])}: {run}")
        lines.append(f"warm start  {duration(spent['warm_start_s'])}, now in the cache")
    return "\n".join(lines)
