"""Cost and statistical power of a campaign before it runs: `retrain campaign FILE --dry-run`."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from retrain.campaign.plan.campaign_schema import Campaign
from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.plan.plan_file import PLAN
from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import analyze, noise_sources, pooled_deviation, with_spread
from retrain.campaign.verdict.looks import expected_seeds
from retrain.campaign.verdict.run_reader import read_campaign_tables
from retrain.campaign.work.campaign_worker import machine_slots
from retrain.campaign.work.run_process import finish, reason, train, warm_start
from retrain.config.schema import Config
from retrain.errors import RetrainError
from retrain.report.page import duration, plural
from retrain.run.before.explain import run_memory
from retrain.storage.run_files import read_rows
from retrain.system.masking import masked
from retrain.system.process import Process, scratch_folder

_PROBE_STEPS = 2  # the second is timed: the first also compiles and allocates
_EFFECTS = (0.0, 1.0, 1.5, 2.0)
"""True differences, in standard deviations of the paired difference, for which the runs of looks are estimated."""


def preview(loaded: LoadedCampaign, probe: bool) -> dict[str, Any]:
    """Return the cost and the statistical power of a campaign as a JSON-compatible dictionary.

    Args:
        loaded: the campaign.
        probe: run two steps of the first condition, to estimate time, disk use and accuracy.
    Raises:
        RetrainError: the probe failed; `exit_code` is that of its run.
    """
    seeds = loaded.settings.seed_list
    config = loaded.configs[0].config
    variables = machine_slots(loaded.settings.slots, loaded.settings.ranks)
    runs = len(seeds) * len(loaded.conditions)
    slots = len(variables)
    # On each task one condition is the baseline, which is not compared with itself.
    comparisons = len(loaded.conditions) - max(1, len(loaded.settings.tasks))
    first = loaded.cell_config(loaded.conditions[0], seeds[0])
    spent, reached, sizes = _probe(first, config, loaded.settings.ranks, variables[0]) if probe else ({}, None, None)
    noise = spread(loaded, reached)
    every = config.eval.every
    often = f"every {every} steps" if every else "before the first step and after the last"
    facts: dict[str, Any] = {
        "campaign": str(loaded.directory),
        "conditions": {condition.label: masked(dict(condition.overrides)) for condition in loaded.conditions},
        "trains": {
            condition.label: config.method()
            for condition, config in zip(loaded.conditions, loaded.configs, strict=True)
        },
        "baseline": loaded.baseline,
        "seeds": seeds,
        "runs": runs,
        "steps": sum(condition.config.training.max_steps for condition in loaded.configs) * len(seeds),
        "evaluation": f"{config.eval.problems} held-out problems {often}",
        "executor": f"{loaded.executor.name}, {slots} at a time on this machine",
        "power": power(loaded.settings, comparisons, noise),
    }
    if loaded.settings.look_sizes:
        facts["looks"] = look_costs(loaded.settings, comparisons, noise)
    if memory := run_memory(loaded.configs[0], loaded.settings.ranks):
        facts["memory_mb"] = {"run": memory, "at_once": memory * min(runs, slots) * loaded.settings.ranks}
    if sizes is not None:
        starts = loaded.settings.warm_starts * max(1, len(loaded.settings.tasks))  # the probe has computed one
        warm_s = math.ceil((starts - 1) / slots) * spent["warm_start_s"]
        # Runs end at about the same time, so the slots work in rounds.
        campaign_s = math.ceil(runs / slots) * spent["run_s"] + warm_s
        facts["time"] = spent | {"campaign_s": campaign_s, "warm_starts": starts}
        for row in facts.get("looks", {}).get("expected", ()):
            row["campaign_s"] = row["runs"] / slots * spent["run_s"] + warm_s
        facts["disk_mb"] = _disk(sizes, config, loaded.settings.keep, runs, min(runs, slots))
    return facts


class Sizes(NamedTuple):
    """Disk use of one run, in MB: its final model, and each of its checkpoints."""

    model: float
    checkpoint: float

    def left(self, config: Config, keep: str = "all") -> float:
        """Return the disk use of a finished run under `[campaign] keep`, in MB, without metrics and completions."""
        if keep == "metrics":
            return 0.0
        steps = config.training.max_steps
        every = config.checkpoint.every
        saved = math.ceil(steps / every) if every else 1
        # A finished run keeps its checkpoints only with keep = "all".
        newest = min(config.checkpoint.keep, saved) if keep == "all" else 0
        return self.model + self.checkpoint * (newest + (config.checkpoint.best is not None))


def _disk(sizes: Sizes, config: Config, keep: str, runs: int, at_once: int) -> dict[str, Any]:
    """Return the disk use of a campaign in MB: one finished run, all finished runs, and the peak.

    The peak is reached when all runs but the last `at_once` have finished.
    """
    each = sizes.left(config, keep)
    unfinished = sizes.left(config)
    return {
        "keep": keep,
        "run": each,
        "campaign": runs * each,
        "peak": (runs - at_once) * each + at_once * unfinished,
        **sizes._asdict(),
    }


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def measured(document: dict[str, Any], config: Config, ranks: int) -> dict[str, str]:
    """Describe the time, memory and disk use of one run, measured by running two of its steps.

    Args:
        document: content of the run's TOML file; it is changed.
        config: the run's configuration.
        ranks: number of processes that train together.
    Raises:
        RetrainError: the probe failed; `exit_code` is that of its run.
    """
    spent, _, sizes = _probe(document, config, ranks)
    warm = spent["warm_start_s"]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return {
        "run": f"about {duration(spent['run_s'])}{', without the warm start' * bool(warm)}: {_parts(spent)}",
        **({"warm_start": f"{duration(warm)}, now in the cache"} if warm else {}),
        "memory": f"{peak:,.0f} MB at the peak of the largest process, without GPU memory",
        "disk": f"about {sizes.left(config):,.0f} MB: {_on_disk(sizes._asdict())}",
    }


def _on_disk(sizes: Mapping[str, float]) -> str:
    return f"{sizes['model']:,.0f} MB for the model, {sizes['checkpoint']:,.0f} MB for each checkpoint"


def _parts(spent: Mapping[str, float]) -> str:
    steps = f"{spent['start_s']:.0f} s start, {spent['step_s']:.2f} s per step"
    return f"{steps}, {spent['evaluation_s']:.1f} s per evaluation"


@dataclass(frozen=True)
class Spread:
    """Standard deviation over seeds of the paired difference in the first outcome, and the source of the estimate.

    Attributes:
        sources: how much of it is from the sample of problems; "" if nothing was measured.
    """

    sd: float
    source: str
    sources: str = ""


def spread(loaded: LoadedCampaign, reached: float | None = None) -> Spread | None:
    """Estimate the standard deviation of the paired difference in the first outcome; None if it is not known.

    It is measured in the campaign's finished runs. If no comparison has two pairs of them, that of an accuracy is the
    binomial error of two evaluations, which is a lower bound: sd = sqrt(2 p (1 - p) / problems).

    Args:
        loaded: the campaign.
        reached: accuracy p of the probe. If it is None, 0 or 1, p = 0.5, which gives the largest error.
    """
    if measured := _measured(loaded):
        return measured
    problems = loaded.configs[0].config.eval.problems
    if not problems or loaded.settings.all_outcomes[0].metric != "accuracy":
        return None
    # At 0 and 1 the binomial error would be 0, and the campaign would seem to detect anything.
    rate, origin = (reached, "the probe's") if reached is not None and 0 < reached < 1 else (0.5, "worst-case")
    source = f"assumed: the binomial error of two evaluations of {problems} problems at {origin} accuracy {rate:.2g}"
    return Spread(math.sqrt(2 * rate * (1 - rate) / problems), f"{source}; differences between seeds add to it")


def _measured(loaded: LoadedCampaign) -> Spread | None:
    """Pool the variances of the comparisons with at least two complete pairs; None without such a comparison."""
    if not (loaded.directory / PLAN).exists():
        return None
    first = loaded.settings.all_outcomes[0]
    analysis = analyze([table for table in read_campaign_tables(loaded.directory) if table.outcome == first])
    compared = with_spread(analysis)
    # With few pairs all differences can be equal; a standard deviation of 0 would then overstate the power.
    if not (deviation := pooled_deviation(compared)):
        return None
    pairs = sum(comparison.count for comparison in compared)
    return Spread(deviation, f"measured in {pairs} pairs of finished runs", noise_sources(analysis))


def power(settings: Campaign, comparisons: int, noise: Spread | None) -> list[str]:
    """Describe in sentences what the seeds of a campaign can detect, by which test, and what six seeds would add.

    Args:
        settings: seeds, warm starts, level and outcomes.
        comparisons: number of tests that share the level `alpha`.
        noise: estimated standard deviation of the paired difference; None: only effect sizes are reported.
    """
    # A single condition is compared with nothing; its sentences are those of one comparison.
    comparisons = max(1, comparisons)
    starts = settings.warm_starts
    count, unit = (len(settings.seed_list), "paired seed") if starts == 1 else (starts, "warm start")
    exact = statistics.min_seeds_for_exact_test(settings.alpha)
    lines = [_detectable(settings, count, unit, comparisons, noise)]
    if count < exact:
        # Shows what a few more seeds would buy: the exact test, which assumes nothing about the distribution.
        lines.append(_detectable(settings, max(6, exact), unit, comparisons, noise))
    if noise is not None:
        lines.append(f"standard deviation of the paired difference: {noise.sd:.3g} ({noise.source})")
        lines += filter(None, [noise.sources])
    margin = settings.all_outcomes[0].margin
    if noise is not None and margin:
        needed = statistics.seeds_needed(margin, noise.sd, comparisons, settings.alpha)
        shown = f"about {needed:,} {unit}s" if needed else "more than 100,000 seeds"
        lines.append(f"equality within {margin:g} is shown by {shown} in 80%, if there is no difference")
    return lines


def look_costs(settings: Campaign, comparisons: int, noise: Spread | None) -> dict[str, Any]:
    """Return what the first look detects, and the expected number of runs by the size of the true differences.

    Args:
        settings: a campaign with looks.
        comparisons: number of comparisons with a baseline.
        noise: estimated standard deviation of the paired difference; without it the margin is not simulated.
    Returns:
        `text`, a sentence about the looks, and `expected`, rows of `effect` in standard deviations and mean `runs`.
    """
    sizes = settings.look_sizes
    margin = settings.all_outcomes[0].margin
    margin_sd = margin / noise.sd if noise is not None and margin else None
    # Each task has its own baseline, which runs on while any condition of that task does.
    baselines = max(1, len(settings.tasks))
    expected: list[dict[str, float]] = []
    for effect in _EFFECTS:
        compared, baseline = expected_seeds(sizes, comparisons, settings.alpha, effect, margin_sd)
        expected.append({"effect": effect, "runs": comparisons * compared + baselines * baseline})
    first = statistics.detectable_effect(sizes[0], comparisons, statistics.spending(sizes, settings.alpha)[0])
    size = f"{first:.2f} standard deviations"
    size += f" ({first * noise.sd:.3g} {settings.all_outcomes[0].metric})" if noise is not None else ""
    tested = " and ".join([*filter(None, [", ".join(map(str, sizes[:-2]))]), str(sizes[-2])])
    text = f"tested after {tested} of {sizes[-1]} seeds; the first look detects {size} with 80% power"
    return {"text": text, "expected": expected}


def _expected(row: Mapping[str, float]) -> str:
    """Return the expected number of runs, and the time if it is known, for true differences of one size."""
    spent = f", {duration(row['campaign_s'])}" if "campaign_s" in row else ""
    effect = f"differences of {row['effect']:g} sd" if row["effect"] else "without a difference"
    return f"{effect}: {row['runs']:.0f} runs{spent}"


def _detectable(settings: Campaign, count: int, unit: str, comparisons: int, noise: Spread | None) -> str:
    """Return the difference that this number of seeds detects with a power of 80 %, and the test that does."""
    seeds = plural(count, unit)
    if count < statistics.MIN_SEEDS:
        return f"{seeds}: no verdict, only differences; a verdict needs {statistics.MIN_SEEDS}"
    exact = count >= statistics.min_seeds_for_exact_test(settings.alpha)
    test = "the exact max-t test" if exact else "the t test, which assumes roughly normal differences,"
    effect = statistics.detectable_effect(count, comparisons, settings.alpha)
    size = f"{effect:.2f} standard deviations of the paired difference"
    size += f" ({effect * noise.sd:.3g} {settings.all_outcomes[0].metric})" if noise is not None else ""
    return f"{seeds}: {test} detects {size} with 80% power, in a family of {comparisons}"


def _probe(
    document: dict[str, Any], config: Config, ranks: int, slot: Mapping[str, str] | None = None
) -> tuple[dict[str, float], float | None, Sizes]:
    """Run two steps of a configuration in a temporary directory and measure them.

    Args:
        document: content of the run's TOML file; it is changed.
        config: the run's configuration.
        ranks: number of processes that train together.
        slot: environment variables of a campaign's slot; None: start the run as `retrain train` would.
    Returns:
        (estimated seconds of a complete run and of its phases, accuracy after two steps, sizes on disk).
    """
    fresh_process = slot is None
    with scratch_folder("retrain-probe-") as folder:
        run = folder / "probe"
        run.mkdir()
        document.setdefault("training", {})["max_steps"] = _PROBE_STEPS
        # A probe is no run, so no tracker hears of it.
        document.setdefault("logging", {}).update(dir=str(folder), name=run.name, trackers=[])
        (run / "config.toml").write_text(tomli_w.dumps(document), encoding="utf-8")
        # The warm start stays in the cache, so the run or the campaign does not compute it again.
        warm = _timed(run, lambda: warm_start(run, run / "log.txt", {}, fresh_process)) if config.warmup.steps else 0.0
        wall = _timed(run, lambda: train(run, ranks, slot or {}, fresh_process))
        metrics = read_rows(run / "metrics.jsonl")
        evals = read_rows(run / "eval.jsonl")
        sizes = Sizes(_megabytes(run / "model"), max(map(_megabytes, run.glob("checkpoints/step-*")), default=0.0))
    evaluations = [float(row["time/evaluation_s"]) for row in evals]
    steps = [float(row["time/step_s"]) for row in metrics]
    # What is neither a step nor an evaluation is the start: imports, model, data. The slower evaluation counts, on the
    # trained model.
    start, each = wall - sum(steps) - sum(evaluations), max(evaluations, default=0.0)
    count = config.training.max_steps
    every = config.eval.every
    # Before the first step, after the last, and every so many steps between.
    times = (2 + ((count - 1) // every if every else 0)) if count else 1
    seconds = {
        "warm_start_s": warm,
        "start_s": start,
        "step_s": steps[-1],
        "evaluation_s": each,
        "run_s": start + count * steps[-1] + times * each,
    }
    return seconds, float(evals[-1]["accuracy"]) if evals else None, sizes


def _timed(run: Path, start: Callable[[], Process]) -> float:
    """Start a process of the probe, wait for its end and return the seconds; RetrainError if it fails."""
    began = time.monotonic()
    if code := finish(start()):
        text = (run / "log.txt").read_text(encoding="utf-8", errors="replace")
        error = RetrainError(f"the probe failed: {reason(run, code)}\n{text[-2000:]}")
        # A shell reports a process killed by signal n as 128 + n, and Python as -n.
        error.exit_code = code if code > 0 else 128 - code
        raise error
    return time.monotonic() - began


def render(facts: Mapping[str, Any]) -> str:
    """Format the result of `preview` for a terminal."""
    width = max(len(label) for label in facts["conditions"])
    lines = [f"{facts['campaign']}: {len(facts['conditions'])} conditions x {len(facts['seeds'])} seeds"]
    for label, overrides in facts["conditions"].items():
        mark = "  (baseline)" if label.rpartition(": ")[2] == facts["baseline"] else ""
        lines.append(f"  {label:<{width}}  {', '.join(f'{key}={value}' for key, value in overrides.items())}{mark}")
        lines.append(f"  {'':<{width}}  -> {facts['trains'][label]}")
    lines += [
        f"seeds       {', '.join(map(str, facts['seeds']))}",
        f"runs        {facts['runs']}, {facts['steps']} steps in all; {facts['executor']}",
        f"evaluation  {facts['evaluation']}",
        *(f"power       {line}" for line in facts["power"]),
    ]
    if looks := facts.get("looks"):
        lines.append(f"looks       {looks['text']}")
        lines += [f"expected    {_expected(row)}" for row in looks["expected"]]
        lines.append(f"expected    with all seeds, as without looks: {facts['runs']} runs")
    if memory := facts.get("memory_mb"):
        lines.append(
            f"memory      about {memory['run']:,.0f} MB per run, {memory['at_once']:,.0f} MB at once; prompts need more"
        )
    if spent := facts.get("time"):
        run = f"{duration(spent['run_s'])} per run, of which {_parts(spent)}"
        lines.append(f"time        about {duration(spent['campaign_s'])}: {run}")
        if spent["warm_start_s"]:
            count = f"{spent['warm_starts']} of " if spent["warm_starts"] > 1 else ""
            lines.append(
                f"warm start  {count}{duration(spent['warm_start_s'])}, {'one ' * bool(count)}now in the cache"
            )
    if sizes := facts.get("disk_mb"):
        kept = f'{sizes["run"]:,.0f} MB per finished run by [campaign] keep = "{sizes["keep"]}"'
        peak = f"up to {sizes['peak']:,.0f} MB during the last runs"
        lines.append(f"disk        about {sizes['campaign']:,.0f} MB, {kept}; {peak} ({_on_disk(sizes)})")
    return "\n".join(lines)
