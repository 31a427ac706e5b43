"""Write the spread of accuracy over seeds into docs/statistics.md: the first guess at what a campaign can detect.

python -m benchmarks.evidence.spread

A run's error from its held-out problems is sqrt(p (1 - p) / problems). The spread over seeds contains it; pairing by
seed removes the part that is common to both runs.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import tomli

from benchmarks.results import write
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.results_file import read_results_file
from retrain.campaign.verdict.runs_of_file import runs_of_file

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/statistics.md"


class Setting(NamedTuple):
    """Runs whose spread is shown.

    Attributes:
        name: task and steps.
        file: name of the file of results.
        task: task of the file, if it has several.
        left_out: controls and conditions that collapse, which say nothing about the spread of a method.
    """

    name: str
    file: str
    task: str = ""
    left_out: tuple[str, ...] = ()


SETTINGS = (
    Setting("`addition`, 24 steps", "length.csv", left_out=("penalty 0.05", "penalty 0.03")),
    Setting("`addition`, easy and hard, 30 steps", "difficulty.csv"),
    Setting("`strategy`, 40 steps", "off-policy.csv", left_out=("stale",)),
    Setting("`rare`, 30 steps", "mix-rare.csv"),
    Setting("`chain`, 30 steps", "prime-chain.csv"),
    Setting("`planning`, 30 steps, a warm start per seed", "credit.csv", "planning", ("oracle", "random credit")),
    Setting("`decoy`, 30 steps, a warm start per seed", "credit.csv", "decoy", ("oracle", "random credit")),
    Setting("SmolLM2, sums, 24 steps", "smollm2.csv"),
    Setting("SmolLM2, sums, 40 steps with LoRA", "length-smollm2.csv"),
    Setting("SmolLM2, sums, 60 steps", "lora.csv"),
)


def row(setting: Setting) -> str:
    """Return the spread of one setting as a row of the table."""
    file = HERE / setting.file
    tables = runs_of_file(file, read_results_file(file), Outcome(metric="accuracy", goal="max"))
    results = next(each for each in tables if each.task == setting.task or not setting.task)
    conditions = [each for each in results.conditions if each not in setting.left_out]
    accuracy = fmean(fmean(results.values(each)) for each in conditions)
    runs = [stdev(results.values(each)) for each in conditions]
    pairs = [paired(results, each, conditions[0]) for each in conditions[1:]]
    problems = problems_of(file)
    error = (accuracy * (1 - accuracy) / problems) ** 0.5
    cells = [
        setting.name,
        str(len(results.seeds)),
        str(problems),
        short(accuracy),
        span(runs),
        span(pairs),
        short(error),
    ]
    return f"| {' | '.join(cells)} |"


def problems_of(file: Path) -> int:
    """Return the number of held-out problems that the campaign's file sets."""
    campaigns = (file.with_suffix(".toml"), HERE.parents[1] / "campaigns" / f"{file.stem}.toml")
    campaign = next(each for each in campaigns if each.exists())
    return tomli.loads(campaign.read_text(encoding="utf-8"))["eval"]["problems"]


def paired(results: Results, condition: str, against: str) -> float:
    """Return the standard deviation over seeds of the difference of two conditions."""
    differences = [
        left.result - right.result
        for left, right in results.pairs(condition, against)
        if left.result is not None and right.result is not None
    ]
    return stdev(differences)


def span(values: list[float]) -> str:
    """Return the least and the greatest of the values."""
    least, greatest = short(min(values)), short(max(values))
    return least if least == greatest else f"{least} to {greatest}"


def short(value: float) -> str:
    """Return three decimals without the zero before the point."""
    return f"{value:.3f}".removeprefix("0")


def table() -> str:
    """Return the table as Markdown."""
    head = "| task | seeds | problems | accuracy | sd of runs | sd of paired differences | error from problems |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(row, SETTINGS)])


if __name__ == "__main__":
    write("spread", table(), PAGE)
