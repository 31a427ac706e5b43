"""Claims of the literature: what each expects, and the word that follows from the runs.

    python benchmarks/evidence/replications.py     prints the tables of docs/replications.md, and draws its figures

The results of each campaign, `results.csv` without the columns that no claim reads, are beside this file. A claim is

- reproduced, if everything that it expects has a corrected verdict ("not worse" includes "equal", "better", and
  "worse" by less than the margin);
- opposite, if something that it expects has the opposite verdict, with the interval beyond the margin if there is one;
- equal, if what it expects is absent, and shown to be within the margin;
- open, otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from retrain.campaign.comparison import Asked, compare
from retrain.campaign.plan.outcome import Goal, Outcome
from retrain.campaign.verdict.analysis import Comparison
from retrain.campaign.verdict.figures import forest_row, scatters, verdict_marks
from retrain.campaign.verdict.figures import keys as legend
from retrain.campaign.verdict.results_file import read_results_file
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.campaign.verdict.sentences import detects, short, texts
from retrain.campaign.verdict.verdict_kinds import KINDS
from retrain.report.exported_figures import Drawing, stacked, standalone

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs/images"

Word = Literal["reproduced", "opposite", "equal", "open"]
Expected = Literal["better", "worse", "not worse"]
Shown = tuple[Comparison, Expected | None]


class Measure(NamedTuple):
    """A column of results.csv, its direction, and the difference that does not matter."""

    column: str
    goal: Goal
    margin: float | None = None


class Expectation(NamedTuple):
    """Verdict that a claim expects of a condition against the first one of its task; None: shown, but not claimed."""

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
WIDER = Measure("accuracy", "max", 0.05)
AREA = Measure("area", "max")
EASY, HARD = Measure("easy/accuracy", "max"), Measure("hard/accuracy", "max")
OVER_TOKENS = {"accuracy-over-tokens": "length.csv", "accuracy-over-tokens-smollm2": "length-smollm2.csv"}
"""Figure of accuracy over tokens -> name of the file of results."""


def each(conditions: Sequence[str], *expected: tuple[Measure, Expected | None]) -> tuple[Expectation, ...]:
    """Return the same expectations of every condition."""
    return tuple(Expectation(condition, *one) for condition in conditions for one in expected)


CLAIMS = (  # declared before their campaigns ran
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
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
    ),
    Claim(
        "DCA shortens answers at equal accuracy: 25 further seeds",
        "length-dca.csv",
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
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
    Claim(
        "A mixture of easy and hard questions is learned no worse without the division",
        "difficulty.csv",
        each(("not divided",), (ACCURACY, "not worse"), (EASY, None), (HARD, None)),
    ),
    Claim(  # declared together with the next one
        "HICRA helps where a plan decides, and harms nothing elsewhere",
        "credit.csv",
        (
            *each(("planning: hicra",), (WIDER, "better")),
            *each(("decoy: hicra",), (WIDER, "not worse")),
            *each(("planning: oracle", "planning: random credit"), (WIDER, None)),
            *each(("decoy: oracle", "decoy: random credit"), (WIDER, None)),
        ),
    ),
    Claim(
        "SEPA helps where a plan decides, and harms nothing elsewhere",
        "credit.csv",
        (
            *each(("planning: sepa",), (WIDER, "better")),
            *each(("decoy: sepa",), (WIDER, "not worse")),
            *each(("planning: gtpo", "decoy: gtpo"), (WIDER, None)),
        ),
    ),
    Claim(
        "SEPA helps where a plan decides: 18 further starts", "sepa-planning.csv", each(("sepa",), (WIDER, "better"))
    ),
    Claim(
        "Old rollouts harm, and truncated importance sampling repairs it",
        "off-policy.csv",
        each(("on-policy", "stale, tis"), (ACCURACY, "better")),
    ),
    Claim(
        "The length claims on SmolLM2",
        "length-smollm2.csv",
        (
            *each(("penalty 0.05",), (WIDER, "worse")),
            *each(("dca 0.2", "dca 1.0"), (TOKENS, "better"), (WIDER, "not worse")),
            *each(("penalty 0.01",), (WIDER, None), (TOKENS, None)),
        ),
    ),
    Claim("LoRA learns as well as all weights", "lora.csv", each(("LoRA",), (WIDER, "not worse"))),
    Claim(
        "Expert data help where the policy cannot start",
        "mix.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
    ),
    Claim(
        "Expert data help where success is rare",
        "mix-rare.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
    ),
    Claim(
        "A process reward learned from outcomes needs fewer samples",
        "prime-chain.csv",
        each(("prime batch", "prime none"), (AREA, "better"), (ACCURACY, "not worse")),
    ),
)


def holds(one: Comparison, expected: Expected) -> bool:
    """Return True if the comparison shows what is expected of it."""
    if expected == "not worse":
        return bool(KINDS[one.kind].holds) or one.judged.equality <= one.alpha
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
    """Compare every condition with the first one of its task; return those of the expectations, in their order."""
    found: list[Shown] = []
    for condition, measure, expected in claim.expectations:
        asked = Asked(measure.column, measure.goal, measure.margin)
        family = compare([HERE / claim.results], asked).comparisons
        found.append((next(one for one in family if named(one) == condition), expected))
    return found


def named(one: Comparison) -> str:
    """Return the condition of a comparison, after its task if the file has several."""
    return f"{one.task}: {one.condition}" if one.task else one.condition


def table(found: Sequence[Shown]) -> list[str]:
    """Return the comparisons as lines of Markdown."""
    lines = [
        "| condition | outcome | difference, 95% CI | corrected p | verdict | claimed |",
        "|---|---|---|---|---|---|",
    ]
    for one, expected in found:
        value, low, high = (f"{number:+.3f}" for number in one.difference)
        verdict = f"{short(one)}; {detects(one)}" if one.kind == "open" and detects(one) else short(one)
        goal = "less" if one.outcome.goal == "min" else "more"
        name = f"{one.outcome.metric.removeprefix('avg_')} ({goal} is better)"
        p = texts(one)["decided"]
        lines.append(f"| {named(one)} | {name} | {value} [{low}, {high}] | {p} | {verdict} | {expected or ''} |")
    return lines


def figures(every: Sequence[tuple[Claim, list[Shown]]]) -> dict[str, str]:
    """Return the figures of README and of the page, as SVG by the name of their file."""
    rows: list[tuple[str, str, str]] = []
    for claim, found in every:
        rows.append((f"{word(found).upper()}: {claim.name}", '<svg viewBox="0 0 340 24"></svg>', ""))
        for one, _ in found:
            numbers = f"{one.difference.value:+.3f} [{one.difference.low:+.3f}, {one.difference.high:+.3f}]"
            rows.append((f"- {title(one)}: {short(one)}", alone(one), numbers))
    claims = [
        (claim.name, alone(deciding(found)), f"{word(found)} ({title(deciding(found))})") for claim, found in every
    ]
    return {
        "replications.svg": standalone(Drawing(stacked(rows, ""), verdict_marks())),
        "claims.svg": standalone(Drawing(stacked(claims, ""), verdict_marks())),
        **{f"{name}.svg": over_tokens(HERE / file) for name, file in OVER_TOKENS.items() if (HERE / file).exists()},
    }


def over_tokens(file: Path) -> str:
    """Draw the accuracy of every condition over the tokens of its answers."""
    rows = read_results_file(file)
    accuracy, tokens = (runs_of_file(file, rows, Outcome(metric=m, goal=goal))[0] for m, goal, _ in (ACCURACY, TOKENS))
    ((_, over), *_) = scatters(accuracy, [tokens])
    return standalone(Drawing(over.replace(TOKENS.column, "tokens per answer"), legend(accuracy)))


def alone(one: Comparison) -> str:
    """Draw a comparison on a scale of its own around 0."""
    wide = 1.15 * max(abs(one.difference.low), abs(one.difference.high), one.outcome.margin or 0.0)
    return forest_row(one, (-wide, wide))


def title(one: Comparison) -> str:
    """Return the condition and the outcome of a comparison."""
    return f"{named(one)}, {one.outcome.metric.removeprefix('mean ').removeprefix('avg_')}"


def deciding(every: Sequence[Shown]) -> Comparison:
    """Return the comparison that decides the word of a claim, or the first one if all hold."""
    found = [(one, expected) for one, expected in every if expected is not None]
    failing = [one for one, expected in found if not holds(one, expected)]
    opposite = [one for one, expected in found if against(one, expected)]
    return (opposite or failing or [found[0][0]])[0]


def with_results() -> list[tuple[Claim, list[Shown]]]:
    """Return the claims whose campaigns have run, with their comparisons."""
    return [(claim, comparisons(claim)) for claim in CLAIMS if (HERE / claim.results).exists()]


if __name__ == "__main__":
    known = with_results()
    for claim, found in known:
        print(f"\n## {claim.name}: {word(found)}\n")
        print("\n".join(table(found)))
    for name, svg in figures(known).items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
