"""Two claims of the literature that need no training: exact figures from the advantages themselves.

    python -m benchmarks.evidence.exact_claims     writes the tables of benchmarks/RESULTS.md, and draws the figures

- "In a group that is all correct, the normalisation absorbs the coefficient of a length penalty" (DCA,
  arXiv:2602.02099): advantages of four right answers of 10, 20, 30 and 40 tokens, over the coefficient.
- "Dividing by the standard deviation weighs very easy and very hard questions up" (Dr. GRPO, arXiv:2503.20783): a
  question's expected sum of |advantage| over a group of eight, by its pass rate, as a multiple of that at one half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, log10
from pathlib import Path
from typing import Any

from benchmarks.results import write
from retrain import compute_composable_advantages
from retrain.report.charts import Axes, Point, polyline, span, svg
from retrain.report.exported_figures import Drawing, standalone

LENGTHS = (10, 20, 30, 40)
GAMMAS = (0.0, 0.0001, 0.001, 0.01, 0.1)
BETAS = (0.0, 0.1, 0.2, 0.5, 1.0)
RATES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
GROUP = 8
MODES = {"no division": "grpo", "standard deviation": "grpo_std", "mean (MaxRL)": "maxrl"}
IMAGES = Path(__file__).parents[2] / "docs/images"


def credit(rewards: Sequence[float], mode: str, lengths: Sequence[int] = (), **params: Any) -> list[float]:
    """Return the advantage of each completion of a group; answers are correct where the reward is above 0."""
    ones = [[0.0]] * len(rewards)
    found = compute_composable_advantages(
        rewards,
        ones,
        [[0]] * len(rewards),
        advantage_mode=mode,
        advantage_params=params,
        lengths_G=[*lengths] or None,
        correct_G=[reward > 0 for reward in rewards],
    )
    return [row[0] for row in found.token_advs]


def penalised(gamma: float) -> list[float]:
    """Advantages of the all-correct group with a length penalty in the reward, 1 - gamma * length."""
    return credit([1.0] * len(LENGTHS), "grpo_lp", LENGTHS, gamma=gamma)


def decoupled(beta: float) -> list[float]:
    """Advantages of the all-correct group with DCA's length term of weight beta."""
    return credit([1.0] * len(LENGTHS), "dca", LENGTHS, beta=beta)


def weight(mode: str, rate: float) -> float:
    """Expected sum of |advantage| of a group of eight answers that are right with this probability."""
    return sum(
        comb(GROUP, right)
        * rate**right
        * (1 - rate) ** (GROUP - right)
        * sum(map(abs, credit([1.0] * right + [0.0] * (GROUP - right), mode)))
        for right in range(1, GROUP)
    )


def relative(mode: str, rates: Sequence[float] = RATES) -> list[float]:
    """Weight of a question by its pass rate, as a multiple of that of a question with pass rate one half."""
    half = weight(mode, 0.5)
    return [weight(mode, rate) / half for rate in rates]


def figures() -> dict[str, str]:
    """Return the figures as SVG by the name of their file: the shortest answer's advantage, and questions' weights."""
    strengths, rates = [10 ** (-4 + step / 10) for step in range(41)], [step / 100 for step in range(1, 100)]
    shortest = {
        "penalty in the reward, over gamma": [(log10(one), penalised(one)[0]) for one in strengths],
        "DCA, over beta": [(log10(one), decoupled(one)[0]) for one in strengths],
    }
    weights = {name: [*zip(rates, relative(mode, rates), strict=True)] for name, mode in MODES.items()}
    return {
        "absorbed.svg": lines(shortest, "log10 of the coefficient"),
        "difficulty.svg": lines(weights, "pass rate of the question"),
    }


def lines(curves: Mapping[str, Sequence[Point]], label: str) -> str:
    """Draw a line for each of the curves."""
    every = [point for curve in curves.values() for point in curve]
    axes = Axes(span([x for x, _ in every]), (0.0, 1.05 * max(y for _, y in every)), label=label)
    drawn = "".join(polyline(axes, curve, f"curve c{index}") for index, curve in enumerate(curves.values()))
    keys = [(name, f'<path class="center c{index}" d="M-6 -2h12v4h-12z"/>') for index, name in enumerate(curves)]
    return standalone(Drawing(svg(axes.draw() + drawn), keys))


def row(name: str, values: Sequence[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:+.3f}" for value in values) + " |"


def tables() -> str:
    """Return both tables as Markdown."""
    lines = ["| all correct, lengths | " + " | ".join(map(str, LENGTHS)) + " |", "|---" * (len(LENGTHS) + 1) + "|"]
    lines += [row(f"penalty, gamma {gamma:g}", penalised(gamma)) for gamma in GAMMAS]
    lines += [row(f"DCA, beta {beta:g}", decoupled(beta)) for beta in BETAS]
    lines += ["", "| pass rate | " + " | ".join(f"{rate:g}" for rate in RATES) + " |", "|---" * (len(RATES) + 1) + "|"]
    for name, mode in MODES.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in relative(mode)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    write("exact-claims", tables())
    for name, drawing in figures().items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")
