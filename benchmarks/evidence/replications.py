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
from retrain.campaign.verdict.results_file import ResultRow, read_results_file
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

COLORS = {"reproduced": "#1f5fa8", "opposite": "#be4614", "equal": "#5d6670", "open": "#5d6670"}
MARKS = {"reproduced": "✓", "opposite": "✗", "equal": "=", "open": "?"}
"""Word of a claim -> its color and its mark in the figures; only a word that decides has a color."""


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
        figure: its result in the figures, that of the weakest expectation at least; `{CONDITION@COLUMN}` is the mean
            of a condition.
    """

    name: str
    results: str
    expectations: tuple[Expectation, ...]
    figure: str


ACCURACY = Measure("accuracy", "max", 0.02)
TOKENS = Measure("avg_tokens", "min")
ENTROPY = Measure("mean policy/entropy", "max")
ENTROPY_OF_ALL = Measure("mean signs/entropy", "max")
WRONG = Measure("mean tokens/wrong", "min")
PASS_8, PASS_16 = Measure("pass@8", "max", 0.02), Measure("pass@16", "max", 0.05)
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
_WIDE, _HEAD, _ROW, _HALF = 660, 32, 44, 70
"""Width, height above the rows, height of a row, and half of the width of an interval, in pixels."""
_LINE, _WORDS = 12 + _HALF, 178
"""Where the dashed line of the intervals is, and where the words begin."""


def each(conditions: Sequence[str], *expected: tuple[Measure, Expected | None]) -> tuple[Expectation, ...]:
    """Return the same expectations of every condition."""
    return tuple(Expectation(condition, *measured) for condition in conditions for measured in expected)


CLAIMS = (  # declared before their campaigns ran
    Claim(
        "A length penalty collapses accuracy",
        "length.csv",
        (
            *each(("penalty 0.05", "penalty 0.03"), (ACCURACY, "worse")),
            *each(("penalty 0.01", "penalty 0.003"), (ACCURACY, None), (TOKENS, None)),
        ),
        "accuracy {grpo@accuracy} → {penalty 0.03@accuracy} (penalty .03), {penalty 0.05@accuracy} (penalty .05)",
    ),
    Claim(
        "DCA shortens answers at equal accuracy",
        "length.csv",
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
        "beta .1: tokens {grpo@avg_tokens} → {dca 0.1@avg_tokens}, accuracy {grpo@accuracy} → {dca 0.1@accuracy}",
    ),
    Claim(  # declared again, because it was open
        "DCA shortens answers at equal accuracy",
        "length-dca.csv",
        each(("dca 1.0", "dca 0.5", "dca 0.2", "dca 0.1"), (TOKENS, "better"), (ACCURACY, "not worse")),
        "beta .1: tokens {grpo@avg_tokens} → {dca 0.1@avg_tokens}, accuracy {grpo@accuracy} → {dca 0.1@accuracy}",
    ),
    Claim(
        "A higher upper clip keeps entropy",
        "clip-higher.csv",
        each(("upper clip .28", "no upper clip"), (ENTROPY, "better"), (ACCURACY, None)),
        "entropy {upper clip .2@mean policy/entropy} → {upper clip .28@mean policy/entropy}",
    ),
    Claim(
        "A loss per sequence makes wrong answers longer",
        "length-bias.csv",
        each(("per token", "dr_grpo"), (WRONG, "better"), (ACCURACY, None)),
        "tokens of a wrong answer {dr_grpo@mean tokens/wrong} → {per sequence@mean tokens/wrong}",
    ),
    Claim(
        "MaxRL raises pass@k where success is rare",
        "pass-at-k.csv",
        each(("rare: maxrl",), (PASS_8, "better"), (ACCURACY, None)),
        "pass@8 {rare: grpo@pass@8} → {rare: maxrl@pass@8}",
    ),
    Claim(
        "Two completions per prompt are enough",
        "two-completions.csv",
        (*each(("32 x 2",), (CLOSE, "not worse")), *each(("4 x 16",), (CLOSE, None))),
        "accuracy: 8 per prompt {8 x 8@accuracy}, 2 per prompt {32 x 2@accuracy}",
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
        "accuracy {planning: grpo@accuracy} → {planning: hicra@accuracy}: too little to matter",
    ),
    Claim(
        "SEPA helps where a plan decides, and harms nothing elsewhere",
        "credit.csv",
        (
            *each(("planning: sepa",), (WIDER, "better")),
            *each(("decoy: sepa",), (WIDER, "not worse")),
            *each(("planning: gtpo", "decoy: gtpo"), (WIDER, None)),
        ),
        "accuracy {planning: grpo@accuracy} → {planning: sepa@accuracy}",
    ),
    Claim(  # declared again, while it was taken for open
        "SEPA helps where a plan decides, and harms nothing elsewhere",
        "sepa-planning.csv",
        each(("sepa",), (WIDER, "better")),
        "accuracy {grpo@accuracy} → {sepa@accuracy}",
    ),
    Claim(
        "Old rollouts harm, and truncated importance sampling repairs it",
        "off-policy.csv",
        each(("on-policy", "stale, tis"), (ACCURACY, "better")),
        "accuracy {stale@accuracy} → {stale, tis@accuracy} repaired, {on-policy@accuracy} without old rollouts",
    ),
    Claim(
        "The length claims on SmolLM2",
        "length-smollm2.csv",
        (
            *each(("penalty 0.05",), (WIDER, "worse")),
            *each(("dca 0.2", "dca 1.0"), (TOKENS, "better"), (WIDER, "not worse")),
            *each(("penalty 0.01",), (WIDER, None), (TOKENS, None)),
        ),
        "beta .2: tokens {grpo@avg_tokens} → {dca 0.2@avg_tokens}, accuracy {grpo@accuracy} → {dca 0.2@accuracy}",
    ),
    Claim(
        "LoRA learns as well as all weights",
        "lora.csv",
        each(("LoRA",), (WIDER, "not worse")),
        "accuracy: all weights {all weights@accuracy}, LoRA {LoRA@accuracy}",
    ),
    Claim(
        "Expert data help where the policy cannot start",
        "mix.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
        "accuracy {grpo@accuracy} → {mix@accuracy}",
    ),
    Claim(
        "An expert's rows help beside reinforcement learning, and not alone",
        "mix-imitation.csv",
        (*each(("mix",), (ACCURACY, "better")), *each(("grpo",), (ACCURACY, "not worse"))),
        "accuracy: the rows alone {imitation@accuracy}, RL alone {grpo@accuracy}, both {mix@accuracy}",
    ),
    Claim(
        "A process reward learned from outcomes needs fewer samples",
        "prime-chain.csv",
        each(("prime batch", "prime none"), (AREA, "better"), (ACCURACY, "not worse")),
        "accuracy over all steps {rloo@area} → {prime batch@area}",
    ),
    Claim(
        "Easy and hard questions are learned as well without the division",
        "difficulty.csv",
        each(("not divided",), (ACCURACY, "not worse"), (EASY, None), (HARD, None)),
        "accuracy: with the division {divided@accuracy}, without {not divided@accuracy}",
    ),
    Claim(
        "Expert data help where success is rare",
        "mix-rare.csv",
        each(("mix",), (ACCURACY, "better"), (AREA, "better")),
        "accuracy {grpo@accuracy} → {mix@accuracy}, over all steps {grpo@area} → {mix@area}",
    ),
    Claim(
        "GTPO helps because of the tokens that it chooses",
        "placebo.csv",
        (*each(("planning: gtpo shuffled",), (WIDER, "worse")), *each(("planning: gtpo",), (WIDER, None))),
        "accuracy {planning: gtpo shuffled@accuracy} at random tokens → {planning: gtpo@accuracy} at its own",
    ),
    Claim(
        "SEPA helps because of the tokens that it chooses",
        "placebo-sepa.csv",
        (*each(("planning: sepa shuffled",), (WIDER, "worse")), *each(("planning: sepa",), (WIDER, None))),
        "accuracy {planning: sepa shuffled@accuracy} at random tokens → {planning: sepa@accuracy} at its own",
    ),
    Claim(
        "15% wrong verdicts cost less than two points",
        "wrong-verdicts.csv",
        each(("noisy: 15% of both",), (ACCURACY, "not worse")),
        "accuracy {noisy: no wrong verdicts@accuracy} → {noisy: 15% of both@accuracy}",
    ),
    Claim(
        "Wrongly accepted answers cost more than wrongly rejected ones",
        "wrong-verdicts.csv",
        each(("noisy: 15% of the wrong accepted",), (ACCURACY, "worse")),
        "accuracy: 15% rejected {noisy: 15% of the right rejected@accuracy}, "
        "15% accepted {noisy: 15% of the wrong accepted@accuracy}",
    ),
    Claim(
        "Credit for failures alone reaches the pass@k of all credit",
        "signs.csv",
        each(
            ("rare: failures alone", "rare: successes times .1"),
            (PASS_16, "not worse"),
            (ENTROPY_OF_ALL, None),
            (WIDER, None),
        ),
        "pass@16 {rare: both signs@pass@16} → {rare: failures alone@pass@16}, "
        "{rare: successes times .1@pass@16} with a tenth of successes",
    ),
    Claim(
        "Credit for successes alone loses entropy",
        "signs.csv",
        each(("rare: successes alone",), (ENTROPY_OF_ALL, "worse"), (PASS_16, None), (WIDER, None)),
        "entropy {rare: both signs@mean signs/entropy} → {rare: successes alone@mean signs/entropy}",
    ),
)


def holds(comparison: Comparison, expected: Expected) -> bool:
    """Return True if the comparison shows what is expected of it."""
    if expected == "not worse":
        return bool(KINDS[comparison.kind].holds) or comparison.judged.equality <= comparison.alpha
    return comparison.kind == expected


def against(comparison: Comparison, expected: Expected) -> bool:
    """Return True if it shows the opposite; with a margin, only if the whole interval lies beyond it."""
    opposite, margin = "better" if expected == "worse" else "worse", comparison.outcome.margin or 0.0
    return comparison.kind == opposite and min(abs(comparison.difference.low), abs(comparison.difference.high)) > margin


def word(shown: Sequence[Shown]) -> Word:
    """Return the word of a claim from the comparisons of which it says something."""
    claimed: list[tuple[Comparison, Expected]] = [
        (comparison, expected) for comparison, expected in shown if expected is not None
    ]
    if all(holds(*case) for case in claimed):
        return "reproduced"
    if any(against(*case) for case in claimed):
        return "opposite"
    absent = [comparison for comparison, expected in claimed if not holds(comparison, expected)]
    return "equal" if all(comparison.judged.equality <= comparison.alpha for comparison in absent) else "open"


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


def named(comparison: Comparison) -> str:
    """Return the condition of a comparison, after its task if the file has several."""
    return f"{comparison.task}: {comparison.condition}" if comparison.task else comparison.condition


def table(shown: Sequence[Shown]) -> list[str]:
    """Return the comparisons as lines of Markdown."""
    lines = [
        "| condition | outcome | difference, 95% CI | corrected p | verdict | claimed |",
        "|---|---|---|---|---|---|",
    ]
    for comparison, expected in shown:
        value, low, high = (f"{number:+.3f}" for number in comparison.difference)
        verdict = (
            f"{short(comparison)}; {detects(comparison)}"
            if comparison.kind == "open" and detects(comparison)
            else short(comparison)
        )
        goal = "less" if comparison.outcome.goal == "min" else "more"
        name = f"{comparison.outcome.metric.removeprefix('avg_')} ({goal} is better)"
        p = texts(comparison)["decided"]
        lines.append(f"| {named(comparison)} | {name} | {value} [{low}, {high}] | {p} | {verdict} | {expected or ''} |")
    return lines


def figures(claims: Sequence[tuple[Claim, list[Shown]]]) -> dict[str, str]:
    """Return the figures of README and of the page, as SVG by the name of their file."""
    decided = latest(claims)
    first = [(claim, shown) for claim, shown in decided if word(shown) != "open"]
    return {
        "replications.svg": picture(decided),
        "claims.svg": picture(first[:IN_README]),
        **{f"{name}.svg": over_tokens(HERE / file) for name, file in OVER_TOKENS.items() if (HERE / file).exists()},
    }


def latest(claims: Sequence[tuple[Claim, list[Shown]]]) -> list[tuple[Claim, list[Shown]]]:
    """Return the last campaign of every claim: a claim has one word."""
    return list({claim.name: (claim, shown) for claim, shown in claims}.values())


def over_tokens(file: Path) -> str:
    """Draw the accuracy of every condition over the tokens of its answers."""
    rows = read_results_file(file)
    accuracy, tokens = (runs_of_file(file, rows, Outcome(metric=m, goal=goal))[0] for m, goal, _ in (ACCURACY, TOKENS))
    ((_, over), *_) = scatters(accuracy, [tokens])
    return standalone(Drawing(over.replace(TOKENS.column, "tokens per answer"), legend(accuracy)))


def picture(rows: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Draw each claim: on the left its weakest expectation, on the right its name, its word and its figure."""
    height = _HEAD + _ROW * len(rows) + 4
    parts = [
        f'<rect width="{_WIDE}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<line x1="{_LINE}" x2="{_LINE}" y1="8" y2="{height - 8}" stroke="{COLORS["open"]}" stroke-dasharray="2 3"/>',
        _text(_LINE - 6, 20, _span("◂ opposite", COLORS["opposite"]), "end"),
        _text(_LINE + 6, 20, _span("as claimed ▸", COLORS["reproduced"])),
        _text(
            _WORDS,
            20,
            _span("dot: the difference (of several, the weakest); bar: its 95% interval", COLORS["open"]),
        ),
    ]
    for index, (claim, shown) in enumerate(rows):
        y = _HEAD + _ROW * index
        said = word(shown)
        parts.append(_interval(*weakest(shown), y + 20, said))
        parts.append(_text(_WORDS, y + 16, _span(claim.name, "#1b1f24")))
        words = _span(f"{MARKS[said]} {said}:", COLORS[said], bold=True) + _span(f" {in_words(claim)}", COLORS["open"])
        parts.append(_text(_WORDS, y + 33, words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height}" width="{_WIDE}" height="{height}" '
        f'role="img">\n<style>text {{ font: 13px Helvetica, Arial, "DejaVu Sans", sans-serif; }}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, spans: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{spans}</text>'


def _span(words: str, color: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<tspan fill="{color}"{weight}>{svg_text(words)}</tspan>'


def _interval(comparison: Comparison, expected: Expected, y: float, said: Word) -> str:
    """Draw a difference with its interval on a scale of its own, so that what is right of the line is as claimed.

    The line is at the loss that the claim allows: at no difference, or for "not worse" at the margin.
    """
    value, *ends = (
        direction(comparison, expected) * number + allowance(comparison, expected) for number in comparison.difference
    )
    # Half of a bar stays free beyond its far end: if all bars ended at one distance, they would look cut off there.
    scale = _HALF / (max(map(abs, ends)) + abs(ends[1] - ends[0]) / 2)
    low, high = (_LINE + scale * end for end in sorted(ends))
    fill, color = "#ffffff" if said == "open" else COLORS[said], COLORS[said]
    caps = "".join(f"M{end:.1f} {y - 4:g}v8" for end in (low, high))
    return (
        f'<path d="M{low:.1f} {y:g}H{high:.1f}{caps}" fill="none" stroke="{color}" stroke-width="2"/>'
        f'<circle cx="{_LINE + scale * value:.1f}" cy="{y:g}" r="5" fill="{fill}" stroke="{color}" stroke-width="2"/>'
    )


def allowance(comparison: Comparison, expected: Expected) -> float:
    """Return the loss with which the expectation still holds."""
    return comparison.outcome.margin or 0.0 if expected == "not worse" else 0.0


def direction(comparison: Comparison, expected: Expected) -> int:
    """Return 1 if the claim expects the metric to rise, -1 if it expects it to fall."""
    return (1 if comparison.outcome.goal == "max" else -1) * (-1 if expected == "worse" else 1)


def weakest(shown: Sequence[Shown]) -> tuple[Comparison, Expected]:
    """Return the expectation that is nearest to failing, or furthest from holding, in standard errors."""

    def distance(case: tuple[Comparison, Expected]) -> float:
        comparison, expected = case
        return (
            direction(comparison, expected) * comparison.mean.value + allowance(comparison, expected)
        ) / comparison.mean.error

    return min(((comparison, expected) for comparison, expected in shown if expected is not None), key=distance)


def in_words(claim: Claim) -> str:
    """Return the figure of a claim, with the means over the seeds that all its conditions have.

    A condition is named after its task if the file has tasks.
    """
    runs: dict[str, dict[int, ResultRow]] = {}
    for row in read_results_file(HERE / claim.results):
        runs.setdefault(f"{row.task}: {row.method}" if row.task else row.method, {})[row.seed] = row
    named_conditions = re.findall(r"\{(.+?)@", claim.figure)
    seeds = set.intersection(*(set(runs[condition]) for condition in named_conditions))  # a look stops a condition

    def mean(match: re.Match[str]) -> str:
        condition, column = match.groups()
        value = fmean(float(runs[condition][seed].metrics[column]) for seed in seeds)
        digits = 1 if value > 1 else 3 if value > 0.1 or column == "accuracy" else 4
        return f"{value:.{digits}f}".removeprefix("0")

    return re.sub(r"\{(.+?)@(.+?)\}", mean, claim.figure)


def plain_metric(comparison: Comparison) -> str:
    """Return the name of the metric as the page has it."""
    return comparison.outcome.metric.removeprefix("mean ").removeprefix("avg_")


def summary(claims: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Return the table of the page: one row and one word per claim, with its weakest expectation."""
    lines = [
        "| claim | word | weakest expectation | difference, 95% CI | pairs | campaign |",
        "|---|---|---|---|---|---|",
    ]
    for claim, shown in latest(claims):
        comparison, expected = weakest(shown)
        value, low, high = (f"{number:+.3f}" for number in comparison.difference)
        expects = f"{named(comparison)}: {plain_metric(comparison)} {expected}"
        cells = [
            _link(claim.name),
            f"**{word(shown)}**",
            expects,
            f"{value} [{low}, {high}]",
            f"{len(comparison.seeds)}",
        ]
        lines.append(f"| {' | '.join([*cells, f'`{Path(claim.results).stem}`'])} |")
    lines += [f"| {_link(name)} | **reproduced** | exact, without runs |" for name in EXACT]
    return "\n".join(lines)


def _link(name: str) -> str:
    """Return a link to the section with this heading, whose anchor is made as on GitHub."""
    return f"[{name}](#{re.sub(r'[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})"


def details(claims: Sequence[tuple[Claim, list[Shown]]]) -> str:
    """Return every comparison of every campaign, for benchmarks/RESULTS.md."""
    parts: list[str] = []
    for claim, shown in claims:
        parts += [f"**{claim.name}** (`{claim.results}`): {word(shown)}\n", *table(shown), ""]
    return "\n".join(parts).strip()


def with_results() -> list[tuple[Claim, list[Shown]]]:
    """Return the claims whose campaigns have run, with their comparisons."""
    return [(claim, comparisons(claim)) for claim in CLAIMS if (HERE / claim.results).exists()]


if __name__ == "__main__":
    claims = with_results()
    write("claims", summary(claims), PAGE)
    write("claims-in-full", details(claims))
    for name, drawing in figures(claims).items():
        (IMAGES / name).write_text(drawing, encoding="utf-8")
