"""Write the table of the five standard conditions into benchmarks/RESULTS.md, from the results beside this file.

python -m benchmarks.evidence.ablations
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from benchmarks.results import write
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import Comparison, compare
from retrain.campaign.verdict.judging import Contrast
from retrain.campaign.verdict.results import Results
from retrain.campaign.verdict.results_file import read_results_file
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.campaign.verdict.sentences import short, texts

HERE = Path(__file__).parent
ABLATIONS = {"ablation-smollm2": "smollm2.csv"}
"""Block of RESULTS.md -> name of the file of results."""
ACCURACY = Outcome(margin=0.02)


def families(results: Results) -> dict[str, list[Comparison]]:
    """Compare each condition with the one that it extends, and with the first: two families, each corrected alone."""
    grpo, maxrl, gtpo, *ends = results.conditions
    ladder = [(maxrl, grpo), (gtpo, maxrl), *((end, gtpo) for end in ends)]
    baseline = [(one, grpo) for one in results.conditions[1:]]
    return {
        name: compare([Contrast(results, *pair) for pair in pairs], name)
        for name, pairs in (("ladder", ladder), ("baseline", baseline))
    }


def number(value: float, form: str = "+.3f") -> str:
    """Return a number without the zero before its point."""
    return format(value, form).replace("0.", ".", 1) if abs(value) < 1 else format(value, form)


def sentence(one: Comparison) -> str:
    """Return a comparison in one cell of a table."""
    value, low, high = map(number, one.difference)
    detects = f"; detectable {number(one.detectable, '.3f')}" if one.kind == "open" and one.detectable else ""
    return f"{value} [{low}, {high}], p {texts(one)['decided']}: {short(one)}{detects}"


def table(name: str) -> list[str]:
    """Return the table of an ablation as lines of Markdown."""
    file = HERE / ABLATIONS[name]
    (results,) = runs_of_file(file, read_results_file(file), ACCURACY)
    lines = ["| condition | accuracy | against the condition that it extends | against grpo |", "|---|---|---|---|"]
    found = {kind: {one.condition: sentence(one) for one in every} for kind, every in families(results).items()}
    for condition in results.conditions:
        mean = number(fmean(results.values(condition)), ".3f")
        cells = [condition, mean, *(every.get(condition, "") for every in found.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    for name in ABLATIONS:
        write(name, "\n".join(table(name)))
