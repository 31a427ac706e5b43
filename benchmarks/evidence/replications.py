"""Claims of the literature: what each expects, and the word that follows from the runs.

    python benchmarks/evidence/replications.py          prints the tables of docs/replications.md, in a second, and
                                                        draws docs/images/replications.svg

The results of each campaign, `results.csv` without the columns that no claim reads, are beside this file. A claim is

- reproduced, if everything that it expects has a corrected verdict ("not worse" includes "equal" and "better");
- opposite, if something that it expects has the opposite verdict, with the interval beyond the margin if there is one;
- equal, if what it expects is absent, and shown to be within the margin;
- open, otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from retrain.campaign.plan.outcome import Goal
from retrain.campaign.verdict.analysis import Comparison
from retrain.campaign.verdict.comparison import Asked, compare
from retrain.campaign.verdict.figures import forest_row, verdict_mark
from retrain.campaign.verdict.sentences import detects, p_value, short
from retrain.report.exported_figures import Drawing, stacked, standalone

HERE = Path(__file__).parent
FIGURE = HERE.parents[1] / "docs/images/replications.svg"

Word = Literal["reproduced", "opposite", "equal", "open"]
Expected = Literal["better", "worse", "not worse"]
Shown = tuple[Comparison, Expected | None]


class Measure(NamedTuple):
    """A column of results.csv, its direction, and the difference that does not matter."""

    column: str
    goal: Goal
    margin: float | None = None


class Expectation(NamedTuple):
    """Verdict that a claim expects of a condition against the first one of its file; None: shown, but not claimed."""

    condition: str
    measure: Measure
    expected: Expected | None


class Claim(NamedTuple):
    """A claim with its results.

    Attributes:
        name: a few words; the heading of its section.
        results: name of the file of results.
        expectations: what must hold.
    """

    name: str
    results: str
    expectations: tuple[Expectation, ...]


ACCURACY = Measure("accuracy", "max", 0.02)
TOKENS = Measure("avg_tokens", "min")
ENTROPY = Measure("mean policy/entropy", "max")
WRONG = Measure("mean tokens/wrong", "min")
PASS_8 = Measure("pass@8", "max", 0.02)


def each(conditions: Sequence[str], *expected: tuple[Measure, Expected | None]) -> tuple[Expectation, ...]:
    """Return the same expectations of every condition."""
    return tuple(Expectation(condition, *one) for condition in conditions for one in expected)


CLAIMS = (
    Claim(
        "A length penalty collapses accuracy",
        "length.csv",
        (
            *each(("penalty 0.05", "penalty 0.03"), (ACCURACY, "worse")),
            *each(("penalty 0.01", "penalty 0.003"), (ACCURACY, None), (TOKENS, None)),
        ),
    ),
    Claim(
        "DCA shortens answers at equal accuracy",
        "length.csv",
        each(("dca 0.1", "dca 0.2", "dca 0.5", "dca 1.0"), (TOKENS, "better"), (ACCURACY, "not worse")),
    ),
    Claim(
        "A higher upper clip keeps entropy",
        "clip-higher.csv",
        each(("upper clip .28", "no upper clip"), (ENTROPY, "better"), (ACCURACY, None)),
    ),
    Claim(
        "A loss per sequence makes wrong answers longer",
        "length-bias.csv",
        each(("per token", "dr_grpo"), (WRONG, "better"), (ACCURACY, None)),
    ),
    Claim(
        "MaxRL raises pass@k where success is rare",
        "pass-at-k.csv",
        each(("rare: maxrl",), (PASS_8, "better"), (ACCURACY, None)),
    ),
)


def holds(one: Comparison, expected: Expected) -> bool:
    """Return True if the comparison shows what is expected of it."""
    if expected == "not worse":
        return one.kind in ("better", "equal", "not worse") or one.judged.equality <= one.alpha
    return one.kind == expected


def against(one: Comparison, expected: Expected) -> bool:
    """Return True if it shows the opposite; with a margin, only if the whole interval lies beyond it."""
    opposite, margin = "better" if expected == "worse" else "worse", one.outcome.margin or 0.0
    return one.kind == opposite and min(abs(one.difference.low), abs(one.difference.high)) > margin


def word(every: Sequence[Shown]) -> Word:
    """Return the word of a claim from the comparisons of which it says something."""
    found = [(one, expected) for one, expected in every if expected is not None]
    if all(holds(*one) for one in found):
        return "reproduced"
    if any(against(*one) for one in found):
        return "opposite"
    absent = [one for one, expected in found if not holds(one, expected)]
    return "equal" if all(one.judged.equality <= one.alpha for one in absent) else "open"


def comparisons(claim: Claim) -> list[Shown]:
    """Compare every condition of the file with the first; return those of the expectations, in their order."""
    found: list[Shown] = []
    for condition, measure, expected in claim.expectations:
        asked = Asked(measure.column, measure.goal, measure.margin)
        family = compare([HERE / claim.results], asked).comparisons
        found.append((next(one for one in family if one.condition == condition), expected))
    return found


def table(found: Sequence[Shown]) -> list[str]:
    """Return the comparisons as lines of Markdown."""
    lines = [
        "| condition | outcome | difference, 95% CI | corrected p | verdict | claimed |",
        "|---|---|---|---|---|---|",
    ]
    for one, expected in found:
        value, low, high = (f"{number:+.3f}" for number in one.difference)
        deciding = {"equal": one.judged.equality, "not worse": one.judged.not_worse}
        p = p_value(deciding.get(one.kind, one.judged.corrected)).removeprefix("= ")
        verdict = f"{short(one)}; {detects(one)}" if one.kind == "open" and detects(one) else short(one)
        goal = "less" if one.outcome.goal == "min" else "more"
        name = f"{one.outcome.metric.removeprefix('avg_')} ({goal} is better)"
        lines.append(f"| {one.condition} | {name} | {value} [{low}, {high}] | {p} | {verdict} | {expected or ''} |")
    return lines


def figure(every: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Draw a row for every comparison, each on its own scale around 0, below the claim with its word."""
    rows: list[tuple[str, str, str]] = []
    for claim, found in every:
        rows.append((f"{word(found).upper()}: {claim.name}", '<svg viewBox="0 0 340 24"></svg>', ""))
        for one, _ in found:
            difference, margin = one.difference, one.outcome.margin or 0.0
            wide = 1.15 * max(abs(difference.low), abs(difference.high), margin)
            name = one.outcome.metric.removeprefix("mean ").removeprefix("avg_")
            numbers = f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
            rows.append((f"- {one.condition}, {name}: {short(one)}", forest_row(one, (-wide, wide)), numbers))
    kinds = ("better", "worse", "equal", "not-worse", "open")
    keys = [(kind.replace("-", " "), verdict_mark(kind)) for kind in kinds]
    return standalone(Drawing(stacked(rows, ""), keys))


if __name__ == "__main__":
    known = [(claim, comparisons(claim)) for claim in CLAIMS]
    for claim, found in known:
        print(f"\n## {claim.name}: {word(found)}\n")
        print("\n".join(table(found)))
    FIGURE.write_text(figure(known), encoding="utf-8")
