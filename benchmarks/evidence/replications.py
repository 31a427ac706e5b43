"""Claims of the literature: what each expects, and the word that follows from the runs.

    python -m benchmarks.evidence.replications     writes the tables of docs/replications.md and benchmarks/RESULTS.md,
                                                   and draws the figures

The results of each campaign, `results.csv` without the columns that no claim reads, are beside this file. A claim is

- reproduced, if everything that it expects has a corrected verdict ("not worse" includes "equal", "better", and
  "worse" by less than the margin);
- opposite, if something that it expects has the opposite verdict, with the interval beyond the margin if there is one;
- equal, if what it expects is absent, and shown to be within the margin;
- open, otherwise.

A claim that was declared again has the word of its last campaign.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import tomli

from benchmarks.results import write
from retrain.campaign.plan.outcome import Goal, Outcome
from retrain.campaign.verdict.analysis import Analysis, Comparison, analyze
from retrain.campaign.verdict.figures import keys as legend
from retrain.campaign.verdict.figures import scatters
from retrain.campaign.verdict.results import Cell
from retrain.campaign.verdict.results_file import read_results_file
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.campaign.verdict.sentences import detects, short, texts
from retrain.campaign.verdict.verdict_kinds import KINDS
from retrain.report.charts import svg_text
from retrain.report.exported_figures import Drawing, standalone

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/replications.md"
IMAGES = HERE.parents[1] / "docs/images"

Word = Literal["reproduced", "opposite", "equal", "open"]
Expected = Literal["better", "worse", "not worse"]
Shown = tuple[Comparison, Expected | None]

COLORS = {"reproduced": "#1f5fa8", "opposite": "#be4614", "equal": "#1e7d55", "open": "#5d6670"}
"""Word of a claim -> its color in the figures."""


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
        name: a few words; the heading of its section. A claim that was declared again has one entry per campaign.
        results: name of the file of results; the campaign's file has the same name.
        expectations: what must hold.
        plain: the claim in plain words, for the figures.
    """

    name: str
    results: str
    expectations: tuple[Expectation, ...]
    plain: str


ACCURACY = Measure("accuracy", "max", 0.02)
TOKENS = Measure("avg_tokens", "min")
ENTROPY = Measure("mean policy/entropy", "max")
WRONG = Measure("mean tokens/wrong", "min")
PASS_8 = Measure("pass@8", "max", 0.02)
CLOSE, WIDER = Measure("accuracy", "max", 0.03), Measure("accuracy", "max", 0.05)
AREA = Measure("area", "max")
EASY, HARD = Measure("easy/accuracy", "max"), Measure("hard/accuracy", "max")
OVER_TOKENS = {"accuracy-over-tokens": "length.csv", "accuracy-over-tokens-smollm2": "length-smollm2.csv"}
"""Figure of accuracy over tokens -> name of the file of results."""
EXACT = (
    "The coefficient of a length penalty is absorbed",
    "Division by the standard deviation weighs easy and hard questions up",
)
"""Claims of exact_claims.py, which need no runs."""
IN_README = 8
"""Rows of README's figure; claims that are open are on the page alone."""
_WIDE, _HEAD, _ROW, _HALF = 470, 30, 48, 115
"""Width, height above the rows, height of a row, and half of the width of an interval, in pixels."""


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
        "A strong length penalty collapses accuracy",
    ),
    Claim(
        "DCA shortens answers at equal accuracy",
        "length.csv",
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
        "DCA shortens answers and keeps accuracy",
    ),
    Claim(  # declared again, because it was open
        "DCA shortens answers at equal accuracy",
        "length-dca.csv",
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
        "DCA shortens answers and keeps accuracy",
    ),
    Claim(
        "A higher upper clip keeps entropy",
        "clip-higher.csv",
        each(("upper clip .28", "no upper clip"), (ENTROPY, "better"), (ACCURACY, None)),
        "A higher upper clip keeps entropy",
    ),
    Claim(
        "A loss per sequence makes wrong answers longer",
        "length-bias.csv",
        each(("per token", "dr_grpo"), (WRONG, "better"), (ACCURACY, None)),
        "A loss per sequence lengthens wrong answers",
    ),
    Claim(
        "MaxRL raises pass@k where success is rare",
        "pass-at-k.csv",
        each(("rare: maxrl",), (PASS_8, "better"), (ACCURACY, None)),
        "MaxRL raises pass@8 where success is rare",
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
        "HICRA's credit helps where a plan decides",
    ),
    Claim(
        "SEPA helps where a plan decides, and harms nothing elsewhere",
        "credit.csv",
        (
            *each(("planning: sepa",), (WIDER, "better")),
            *each(("decoy: sepa",), (WIDER, "not worse")),
            *each(("planning: gtpo", "decoy: gtpo"), (WIDER, None)),
        ),
        "SEPA's credit helps where a plan decides",
    ),
    Claim(  # declared again, while it was taken for open
        "SEPA helps where a plan decides, and harms nothing elsewhere",
        "sepa-planning.csv",
        each(("sepa",), (WIDER, "better")),
        "SEPA's credit helps where a plan decides",
    ),
    Claim(
        "Old rollouts harm, and truncated importance sampling repairs it",
        "off-policy.csv",
        each(("on-policy", "stale, tis"), (ACCURACY, "better")),
        "Importance sampling repairs old rollouts",
    ),
    Claim(
        "The length claims on SmolLM2",
        "length-smollm2.csv",
        (
            *each(("penalty 0.05",), (WIDER, "worse")),
            *each(("dca 0.2", "dca 1.0"), (TOKENS, "better"), (WIDER, "not worse")),
            *each(("penalty 0.01",), (WIDER, None), (TOKENS, None)),
        ),
        "The first two, on SmolLM2",
    ),
    Claim(
        "LoRA learns as well as all weights",
        "lora.csv",
        each(("LoRA",), (WIDER, "not worse")),
        "LoRA learns as well as all weights",
    ),
    Claim(
        "Expert data help where the policy cannot start",
        "mix.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
        "Expert data help where the policy cannot start",
    ),
    Claim(
        "An expert's rows help beside reinforcement learning, and not alone",
        "mix-imitation.csv",
        (*each(("mix",), (ACCURACY, "better")), *each(("grpo",), (ACCURACY, "not worse"))),
        "GRPO is no worse than copying an expert",
    ),
    Claim(
        "Expert data help where success is rare",
        "mix-rare.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
        "Expert data help where success is rare",
    ),
    Claim(
        "A process reward learned from outcomes needs fewer samples",
        "prime-chain.csv",
        each(("prime batch", "prime none"), (AREA, "better"), (ACCURACY, "not worse")),
        "PRIME's process reward saves samples",
    ),
    Claim(
        "A mixture of easy and hard questions is learned no worse without the division",
        "difficulty.csv",
        each(("not divided",), (ACCURACY, "not worse"), (EASY, None), (HARD, None)),
        "Without dividing by the spread, learning is as good",
    ),
    Claim(
        "GTPO helps because of the tokens that it chooses",
        "placebo.csv",
        (*each(("planning: gtpo shuffled",), (WIDER, "worse")), *each(("planning: gtpo",), (WIDER, None))),
        "It matters which tokens GTPO credits",
    ),
    Claim(
        "SEPA helps because of the tokens that it chooses",
        "placebo-sepa.csv",
        (*each(("planning: sepa shuffled",), (WIDER, "worse")), *each(("planning: sepa",), (WIDER, None))),
        "It matters which tokens SEPA credits",
    ),
    Claim(
        "Two completions per prompt are enough",
        "two-completions.csv",
        (*each(("32 x 2",), (CLOSE, "not worse")), *each(("4 x 16",), (CLOSE, None))),
        "Two completions per prompt are enough",
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
    claimed: list[tuple[Comparison, Expected]] = [(one, expected) for one, expected in every if expected is not None]
    if all(holds(*one) for one in claimed):
        return "reproduced"
    if any(against(*one) for one in claimed):
        return "opposite"
    absent = [one for one, expected in claimed if not holds(one, expected)]
    return "equal" if all(one.judged.equality <= one.alpha for one in absent) else "open"


@cache
def analysis(results: str, measure: Measure) -> Analysis:
    """Compare the conditions of a file of results in one outcome, in the families of its campaign."""
    file = HERE / results
    campaign = tomli.loads(file.with_suffix(".toml").read_text(encoding="utf-8"))["campaign"]
    outcome = Outcome(metric=measure.column, goal=measure.goal, margin=measure.margin)
    tables = runs_of_file(file, read_results_file(file), outcome)
    controls = tuple(campaign.get("controls", ()))  # a family of their own, as in the campaign's report
    placebos = {
        each["label"]: each["against"]
        for each in campaign["conditions"]
        if each["label"] in controls and "against" in each
    }
    seeds, looks = campaign["seeds"], campaign.get("looks", ())
    order = seeds if isinstance(seeds, list) else range(seeds)
    declared = tuple(tuple(order[:size]) for size in (*looks, len(order))) if looks else ()
    facts: dict[str, Any] = {"controls": controls, "control_of": placebos, "looks": declared}
    return analyze([replace(each, cells=_ended(each.cells) if looks else each.cells, **facts) for each in tables])


def _ended(cells: Mapping[tuple[str, int], Cell]) -> dict[tuple[str, int], Cell]:
    """Mark runs with a result as ended, which a file does not say and a look waits for."""
    return {run: replace(cell, ended=cell.done) for run, cell in cells.items()}


def comparisons(claim: Claim) -> list[Shown]:
    """Compare every condition with the first one of its task; return those of the expectations, in their order."""
    shown: list[Shown] = []
    for condition, measure, expected in claim.expectations:
        family = analysis(claim.results, measure).comparisons
        shown.append((next(each for each in family if named(each) == condition), expected))
    return shown


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


def figures(known: Sequence[tuple[Claim, list[Shown]]]) -> dict[str, str]:
    """Return the figures of README and of the page, as SVG by the name of their file."""
    decided = latest(known)
    first = [(claim, shown) for claim, shown in decided if word(shown) != "open"]
    return {
        "replications.svg": picture(decided),
        "claims.svg": picture(first[:IN_README]),
        **{f"{name}.svg": over_tokens(HERE / file) for name, file in OVER_TOKENS.items() if (HERE / file).exists()},
    }


def latest(known: Sequence[tuple[Claim, list[Shown]]]) -> list[tuple[Claim, list[Shown]]]:
    """Return the last campaign of every claim: a claim has one word."""
    return list({claim.name: (claim, shown) for claim, shown in known}.values())


def over_tokens(file: Path) -> str:
    """Draw the accuracy of every condition over the tokens of its answers."""
    rows = read_results_file(file)
    accuracy, tokens = (runs_of_file(file, rows, Outcome(metric=m, goal=goal))[0] for m, goal, _ in (ACCURACY, TOKENS))
    ((_, over), *_) = scatters(accuracy, [tokens])
    return standalone(Drawing(over.replace(TOKENS.column, "tokens per answer"), legend(accuracy)))


def picture(rows: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Draw two lines for each claim: its words, and its weakest expectation; right is as the claim says."""
    height = _HEAD + _ROW * len(rows) + 6
    note = "Right: as claimed. Left: the opposite. Shaded: too small to matter."
    parts = [f'<rect width="{_WIDE}" height="{height}" rx="6" fill="#ffffff"/>', _text(10, 20, note, "#5d6670", 12)]
    for index, (claim, shown) in enumerate(rows):
        y = _HEAD + _ROW * index
        color = COLORS[word(shown)]
        parts.append(_text(10, y + 14, claim.plain))
        parts.append(_text(_WIDE - 10, y + 14, word(shown), color, bold=True))
        parts.append(_interval(*weakest(shown), y + 30, color))
        parts.append(_text(_WIDE - 10, y + 34, change(claim, weakest(shown)[0]), "#5d6670"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" width="{_WIDE}" height="{height}" '
        f'role="img">\n<style>text {{ font-family: Helvetica, Arial, "DejaVu Sans", sans-serif; }}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, color: str = "#1b1f24", size: int = 13, bold: bool = False) -> str:
    anchor = "end" if x > _WIDE / 2 else "start"
    weight = ' font-weight="bold"' if bold else ""
    style = f'font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{svg_text(words)}</text>'


def _interval(one: Comparison, expected: Expected, y: float, color: str) -> str:
    """Draw a difference with its interval and its margin on a scale of its own around 0."""
    ends = sorted(direction(one, expected) * end for end in (one.difference.low, one.difference.high))
    margin = one.outcome.margin or 0.0
    scale = _HALF / (1.1 * max(*map(abs, ends), margin))
    middle = 10 + _HALF
    low, high = (middle + scale * end for end in ends)
    center = middle + scale * direction(one, expected) * one.difference.value
    return (
        f'<rect x="{middle - scale * margin:.1f}" y="{y - 9:g}" width="{2 * scale * margin:.1f}" height="18" '
        f'fill="#e9ecef"/><line x1="{middle}" x2="{middle}" y1="{y - 9:g}" y2="{y + 9:g}" stroke="#5d6670" '
        f'stroke-dasharray="2 3"/><line x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}" stroke="{color}" '
        f'stroke-width="2.2"/><circle cx="{center:.1f}" cy="{y:g}" r="5" fill="{color}"/>'
    )


def direction(one: Comparison, expected: Expected) -> int:
    """Return 1 if the claim expects the metric to rise, -1 if it expects it to fall."""
    return (1 if one.outcome.goal == "max" else -1) * (-1 if expected == "worse" else 1)


def weakest(shown: Sequence[Shown]) -> tuple[Comparison, Expected]:
    """Return the expectation that is nearest to failing, or furthest from holding, in standard errors."""

    def distance(case: tuple[Comparison, Expected]) -> float:
        one, expected = case
        allowed = one.outcome.margin or 0.0 if expected == "not worse" else 0.0
        return (direction(one, expected) * one.mean.value + allowed) / one.mean.error

    return min(((one, expected) for one, expected in shown if expected is not None), key=distance)


def change(claim: Claim, one: Comparison) -> str:
    """Return the means of the baseline and of the condition: `accuracy .754 to .617`."""
    measure = next(
        each.measure
        for each in claim.expectations
        if each.condition == named(one) and each.measure.column == one.outcome.metric
    )
    table = next(each for each in analysis(claim.results, measure).tables if each.task == one.task)
    before, after = (fmean(table.values(label)) for label in (one.against, one.condition))
    digits = ".1f" if before > 1 else ".3f"
    numbers = [format(value, digits).removeprefix("0") for value in (before, after)]
    return f"{PLAIN.get(plain_metric(one), plain_metric(one))} {numbers[0]} to {numbers[1]}"


PLAIN = {"tokens/wrong": "tokens if wrong", "policy/entropy": "entropy", "area": "area under the curve"}
"""Metric -> its name in the figures."""


def plain_metric(one: Comparison) -> str:
    """Return the name of the metric as the page has it."""
    return one.outcome.metric.removeprefix("mean ").removeprefix("avg_")


def summary(known: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Return the table of the page: one row and one word per claim, with its weakest expectation."""
    lines = [
        "| claim | word | weakest expectation | difference, 95% CI | pairs | campaign |",
        "|---|---|---|---|---|---|",
    ]
    for claim, shown in latest(known):
        one, expected = weakest(shown)
        value, low, high = (f"{number:+.3f}" for number in one.difference)
        expects = f"{named(one)}: {plain_metric(one)} {expected}"
        cells = [_link(claim.name), f"**{word(shown)}**", expects, f"{value} [{low}, {high}]", f"{len(one.seeds)}"]
        lines.append(f"| {' | '.join([*cells, f'`{Path(claim.results).stem}`'])} |")
    lines += [f"| {_link(name)} | **reproduced** | exact, without runs | | | |" for name in EXACT]
    return "\n".join(lines)


def _link(name: str) -> str:
    """Return a link to the section with this heading, whose anchor is made as on GitHub."""
    return f"[{name}](#{re.sub(r'[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})"


def details(known: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Return every comparison of every campaign, for benchmarks/RESULTS.md."""
    parts: list[str] = []
    for claim, shown in known:
        parts += [f"**{claim.name}** (`{claim.results}`): {word(shown)}\n", *table(shown), ""]
    return "\n".join(parts).strip()


def with_results() -> list[tuple[Claim, list[Shown]]]:
    """Return the claims whose campaigns have run, with their comparisons."""
    return [(claim, comparisons(claim)) for claim in CLAIMS if (HERE / claim.results).exists()]


if __name__ == "__main__":
    known = with_results()
    write("claims", summary(known), PAGE)
    write("claims-in-full", details(known))
    for name, drawing in figures(known).items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")
