"""Simulate size, power and coverage of the tests of a comparison: `python -m docs.power [TABLES] [FILE.svg]`.

It prints the tables of benchmarks/RESULTS.md and draws the power by the number of seeds: that of the verdicts, and
that of Holm's correction of exact p-values, which needs two to the power of the seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.campaign.verdict.statistics import (
    LEVEL,
    SequentialFamily,
    holm,
    max_t,
    mean_of,
    nominal_levels,
    paired_tests,
    spending,
    unpaired_tests,
)
from retrain.report.charts import Axes, polyline, svg
from retrain.report.exported_figures import Drawing, standalone

SEEDS = range(3, 10)
SIZES = (1, 4, 9)
KINDS = ("normal", "binomial, 64 problems", "exponential, one baseline", "collapse in 1 run of 10")


def simulated(kind: str, size: int, seeds: int, rng: np.random.Generator, effect: float = 0.0) -> Any:
    """Paired differences [size, seeds] of methods from one baseline; the first has an effect, in sd of a difference."""
    shape = size + 1, seeds
    if kind == "binomial, 64 problems":
        rate = np.clip(0.5 + rng.normal(0, 0.03, seeds) + np.zeros(shape), 0, 1)
        rate[1] = np.clip(rate[1] + effect * (0.5 / 64) ** 0.5, 0, 1)
        results = rng.binomial(64, rate) / 64
        return (results[1:] - results[0]).round(9)
    noise = rng.exponential(size=shape) if kind.startswith("exponential") else rng.normal(size=shape)
    if kind.startswith("collapse"):
        noise[1:] += np.where(rng.random((size, seeds)) < 0.1, -9.0, 1.0)  # 10 % lose 10, so the means are equal
    noise[1] += effect * 2**0.5
    return noise[1:] - noise[0]


def claimed(paired: Any) -> list[bool]:
    """Return for each comparison of a family if its verdict is better or worse."""
    tested = paired_tests(paired, [0.0] * len(paired))
    return [bool(one.test) and one.corrected <= LEVEL for one in tested]


def uneven(pairs: Sequence[int], effects: Sequence[float], tables: int) -> tuple[float, float]:
    """Simulate families whose methods have different numbers of finished runs, normal, one baseline.

    Args:
        pairs: number of pairs of each method; the largest is the number of seeds.
        effects: true difference of each method in standard deviations of a paired difference; the first is named.
        tables: number of simulated families.
    Returns:
        Share of families that name the first method, and share with a false claim about a method without an effect.
    """
    rng = np.random.default_rng([*pairs, *(round(10 * effect) for effect in effects)])
    seeds, named, false = max(pairs), 0, 0
    for _ in range(tables):
        noise = rng.normal(size=(len(pairs) + 1, seeds))
        paired = noise[1:] - noise[0] + np.array(effects)[:, None] * 2**0.5
        for row, count in zip(paired, pairs, strict=True):
            row[rng.permutation(seeds)[count:]] = np.nan
        claims = claimed(paired)
        named += claims[0]
        false += any(claim for claim, effect in zip(claims, effects, strict=True) if not effect)
    return named / tables, false / tables


UNEVEN = (
    ("12 seeds, 1.5 sd; a method without effect has 2 seeds", (12, 2), (1.5, 0)),
    ("the same, three methods without effect have 2 seeds", (12, 2, 2, 2), (1.5, 0, 0, 0)),
    ("the same, three methods without effect have 7 seeds", (12, 7, 7, 7), (1.5, 0, 0, 0)),
    ("6 seeds, two methods of 2.5 sd, one lost a run", (6, 5), (2.5, 2.5)),
    ("no effect, 12, 12, 7 and 6 seeds", (12, 12, 7, 6), (0, 0, 0, 0)),
    ("no effect, 8, 8 and 6 seeds", (8, 8, 6), (0, 0, 0)),
    ("no effect, 6, 6 and 6 seeds", (6, 6, 6), (0, 0, 0)),
    ("no effect, 12, 12, 4 and 3 seeds", (12, 12, 4, 3), (0, 0, 0, 0)),
)
"""Families of section "Simulations": what it is, pairs of each method, effects in sd."""


UNPAIRED = (((12, 0.01), (4, 0.05)), ((20, 0.01), (5, 0.05)), ((8, 0.01), (4, 0.05)), ((6, 0.01), (6, 0.05)))
"""Runs and standard deviation of two conditions without a difference."""


def unpaired(first: tuple[int, float], second: tuple[int, float], tables: int) -> float:
    """Share of pairs of conditions without a difference, whose runs do not pair, that have a claim."""
    rng = np.random.default_rng([first[0], second[0]])
    values = [[rng.normal(0.5, sd, runs).tolist() for runs, sd in (first, second)] for _ in range(tables)]
    return float(np.mean([unpaired_tests([(left, right)], [0.0])[0].corrected <= LEVEL for left, right in values]))


LOOKS = (8, 12, 16)
"""Seeds of the looks whose size, power and bias are simulated."""
SEQUENTIAL = [
    *((kind, (0.0,) * size, None) for kind in KINDS[:3] for size in SIZES),
    *((KINDS[0], (effect,), None) for effect in (1.0, 1.5, 2.0)),
    (KINDS[0], (2.0, 1.0, 0.0, 0.0), None),
    *((KINDS[0], (0.0,) * size, 1.0) for size in SIZES),
]
"""Data, true differences and margin, both in standard deviations of a paired difference."""


def sequential(kind: str, effects: Sequence[float], margin: float | None, tables: int) -> dict[str, str]:
    """Simulate families under declared looks.

    Returns:
        false claims: share of families in which a method without an effect is better or worse; named: share of each
        true difference that is; equal: share of the other methods within the margin; seeds: mean of each method; bias:
        mean estimate over the true difference, where a look before the last stopped it.
    """
    rng = np.random.default_rng([*LOOKS, len(kind), len(effects), round(10 * sum(effects))])
    size = len(effects)
    spent = spending(LOOKS)
    levels = nominal_levels(LOOKS)
    false = 0
    claims = np.zeros(size)
    within = np.zeros(size)
    seeds = np.full(size, 0.0)
    estimates: list[float] = []
    for _ in range(tables):
        paired = simulated(kind, size, LOOKS[-1], rng) / 2**0.5 + np.asarray(effects)[:, None]
        family = SequentialFamily(paired, LOOKS, [0.0] * size, range(LOOKS[-1]), draws=2000)
        remaining = [*range(size)]
        equal: dict[int, int] = {}
        claimed_falsely = False
        for look, count in enumerate(LOOKS):
            p = family.test(look, remaining, equal)
            ended = [index for index in remaining if p[index] <= spent[look]]
            claimed_falsely |= any(effects[index] == 0 for index in ended)
            claims[ended] += 1
            early = [index for index in ended if effects[index] and count < LOOKS[-1]]
            estimates += [float(paired[index, :count].mean()) / effects[index] for index in early]
            inside: list[int] = []
            for index in remaining if margin else ():
                interval = mean_of(paired[index, :count].tolist()).interval(levels[look])
                if index not in ended and -margin < interval.low and interval.high < margin:
                    inside.append(index)
            within[inside] += 1
            equal |= dict.fromkeys(inside, look)
            seeds[ended + inside if count < LOOKS[-1] else remaining] += count
            remaining = [index for index in remaining if index not in (*ended, *inside)]
        false += claimed_falsely
    true = [index for index in range(size) if effects[index]]
    return {
        "false claims": f"{false / tables:.3f}" if len(true) < size else "-",
        "named": ", ".join(f"{claims[index] / tables:.3f}" for index in true) or "-",
        "equal": f"{within.mean() / tables:.3f}" if margin else "-",
        "seeds": ", ".join(
            dict.fromkeys(f"{number / tables:.1f}" for number in (seeds[true] if true else [seeds.mean()]))
        ),
        "bias": f"{np.mean(estimates):.2f}" if estimates else "-",
    }


def claimed_by_holm(paired: Any) -> list[bool]:
    """Return for each comparison if it is significant by Holm's correction of exact sign-flip p-values."""
    return [p <= 0.05 for p in holm([max_t([row])[0] for row in paired])]


def size_of(kind: str, size: int, seeds: int, tables: int) -> float:
    """Share of simulated families without any effect that have a claim."""
    rng = np.random.default_rng([size, seeds, KINDS.index(kind)])
    return float(np.mean([any(claimed(simulated(kind, size, seeds, rng))) for _ in range(tables)]))


def power_of(size: int, seeds: int, tables: int, effect: float = 2.0) -> tuple[float, float]:
    """Shares of simulated families whose only effect is claimed: by the verdicts, and by Holm over exact p-values."""
    rng, found = np.random.default_rng([size, seeds]), np.zeros(2)
    for _ in range(tables):
        paired = simulated("normal", size, seeds, rng, effect)
        found += [claimed(paired)[0], claimed_by_holm(paired)[0]]
    return float(found[0] / tables), float(found[1] / tables)


def coverage_of(kind: str, seeds: int, tables: int) -> float:
    """Share of simulated comparisons whose 95% interval covers the true difference."""
    rng, covered = np.random.default_rng([seeds, KINDS.index(kind)]), 0
    true = (0.5 / 64) ** 0.5 if kind.startswith("binomial") else 2**0.5
    for _ in range(tables):
        found = mean_of(simulated(kind, 1, seeds, rng, 1.0)[0]).interval()
        covered += found.low <= true <= found.high
    return covered / tables


def drawn(powers: dict[tuple[int, int], tuple[float, float]]) -> str:
    """The power by the number of seeds, as an SVG document."""
    axes = Axes((3.0, 9.0), (0.0, 1.0), True, "seeds")
    lines = ""
    for index, size in enumerate(SIZES):
        for which, dash in ((0, ""), (1, ' stroke-dasharray="5 4"')):
            points = [(float(seeds), powers[size, seeds][which]) for seeds in SEEDS]
            lines += polyline(axes, points, f"curve c{index}").replace("class=", f"{dash} class=".lstrip())
    keys = [
        (f"family of {size}", f'<path class="center c{index}" d="M-6 -2h12v4h-12z"/>')
        for index, size in enumerate(SIZES)
    ]
    return standalone(Drawing(svg(axes.draw() + lines), keys))


def table(head: str, rows: dict[str, list[float]]) -> str:
    """A Markdown table with a column for each number of seeds."""
    lines = [f"| {head} | {' | '.join(map(str, SEEDS))} |", "|" + "---|" * (len(SEEDS) + 1)]
    shown = {name: " | ".join(f"{value:.3f}".replace("0.", ".") for value in row) for name, row in rows.items()}
    return "\n".join([*lines, *(f"| {name} | {row} |" for name, row in shown.items())])


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    sizes = {f"{kind}, family of {m}": [size_of(kind, m, n, count) for n in SEEDS] for kind in KINDS for m in SIZES}
    print(table("size: data, family; seeds", sizes))
    print(table("coverage: data; seeds", {kind: [coverage_of(kind, n, count) for n in SEEDS] for kind in KINDS}))
    print("| family; tables with uneven runs | names the effect | false claims |\n|---|---|---|")
    for name, pairs, effects in UNEVEN:
        named, false = (f"{share:.3f}".replace("0.", ".") for share in uneven(pairs, effects, count))
        print(f"| {name} | {named if effects[0] else '-'} | {false if 0 in effects else '-'} |")
    print("| unpaired runs (sd) | false claims |\n|---|---|")
    for first, second in UNPAIRED:
        share = f"{unpaired(first, second, count):.3f}".replace("0.", ".", 1)
        print(f"| {first[0]} ({first[1]}) against {second[0]} ({second[1]}) | {share} |")
    print("| data; differences in sd; margin | false claims | named | equal | seeds | estimate / truth |")
    print("|---|---|---|---|---|---|")
    for kind, effects, margin in SEQUENTIAL:
        name = f"{kind}; {', '.join(f'{effect:g}' for effect in effects)}; {margin or '-'}"
        row = sequential(kind, effects, margin, count)
        print(f"| {name} | {' | '.join(row.values())} |".replace(" 0.", " ."))
    found = {(m, n): power_of(m, n, count) for m in SIZES for n in SEEDS}
    for which, name in enumerate(("verdicts", "Holm over exact p")):
        rows = {f"{name}, family of {m}": [found[m, n][which] for n in SEEDS] for m in SIZES}
        print(table("power at 2 sd; seeds", rows))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(drawn(found), encoding="utf-8")
