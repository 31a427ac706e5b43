"""Commands about formulas: `verify` checks their properties, `credit` compares their results on a file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import Json
from retrain.system.files import writing
from retrain.system.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from retrain.lab.credit.credit_comparison import ComparedCompletion, Credit

_ROWS = 40
"""Largest number of completions in a table."""


def verify(
    trials: Annotated[int, typer.Option(min=1, help="Random inputs per check.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Check properties of the formulas on random inputs; the exit code is 1 if a check fails."""
    from retrain.lab.formula_checks import verify as checks

    rows = list[dict[str, object]]()
    for check in checks(trials, seed):
        rows.append({**asdict(check), "ok": check.ok})
        if not as_json:
            bound = f"above {check.limit:g}" if check.above else f"at most {check.limit:g}"
            say(f"{'ok' if check.ok else 'FAILED':<7} {check.name:<74} {check.figure:9.2e}  ({bound})")
    if as_json:
        say(json.dumps(rows, indent=2))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def credit(  # noqa: PLR0913 - the options of the command
    file: Annotated[
        Path,
        typer.Argument(help=".jsonl, .jsonl.gz or .parquet: group, reward or correct, length.", show_default=False),
    ],
    modes: Annotated[list[str] | None, typer.Option("--mode", help="Name of an advantage. Repeatable.")] = None,
    transforms: Annotated[
        list[str] | None, typer.Option("--transform", help="Token transforms, by name or A,B. Repeatable.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter: grpo_lp.gamma=1e-3. Repeatable.")
    ] = None,
    sepa_lambda: Annotated[float, typer.Option(min=0.0, max=1.0, help="Pooling weight of sepa.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Also write an HTML page with figures.")] = None,
    as_json: Json = False,
) -> None:
    """Compare the advantages of the completions in a file under several modes and token transforms, without a model."""
    from retrain.lab.credit.credit_comparison import compare, read_completions
    from retrain.lab.credit.credit_page import page

    completions = read_completions(str(file))
    with warnings.catch_warnings(record=True) as caught:
        # Python shows a repeated warning once, and which mode caused it would depend on their order.
        warnings.simplefilter("always")
        wanted = modes or ["dca", "grpo_lp", "grpo_std"]
        credits_ = compare(completions, wanted, transforms or (), overrides or (), sepa_lambda)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"warning: {text}", error=True)
    if plot is not None:
        with writing(plot):
            plot.write_text(page(file.name, completions, credits_), encoding="utf-8")
    if as_json:
        rows = [
            {name: value for name, value in asdict(completion).items() if name != "line"} for completion in completions
        ]
        say(json.dumps({"completions": rows, "credit": [asdict(credit) for credit in credits_]}, indent=2))
        return
    _tables(completions, credits_)
    if plot is not None:
        say(f"{plot}: written")


def _tables(completions: Sequence[ComparedCompletion], credits_: Sequence[Credit]) -> None:
    from rich.console import Console
    from rich.table import Table

    from retrain.lab.credit.credit_comparison import SUMMARY, figures

    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("group", "reward", "right", "tokens", *(credit.name for credit in credits_)):
        table.add_column(name, justify="right")
    for row, completion in enumerate(completions[:_ROWS]):
        facts = (
            completion.group,
            f"{completion.reward:g}",
            "yes" if completion.correct else "no",
            str(completion.length),
        )
        table.add_row(*facts, *(f"{credit.advantages[row]:+.4f}" for credit in credits_))
    summary = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", *SUMMARY.values()):
        summary.add_column(name, justify="right" if name else "left")
    for credit in credits_:
        summary.add_row(credit.name, *figures(credit))
    # A file has no width, and rich would wrap the table at 80 columns.
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    if len(completions) > _ROWS:
        console.print(f"... and {len(completions) - _ROWS} more completions; --json prints all of them")
    console.print()
    console.print(summary)
    _heat(console, completions, credits_)


def _heat(console: Console, completions: Sequence[ComparedCompletion], credits_: Sequence[Credit]) -> None:
    """Print the tokens of the first group on a background color that shows their credit; numbers outside a terminal."""
    from rich.text import Text

    for credit in credits_:
        if credit.tokens is None:
            continue
        console.print(f"\n{credit.name}, tokens of group {completions[0].group}")
        rows = [i for i, completion in enumerate(completions) if completion.group == completions[0].group]
        scale = max((abs(value) for i in rows for value in credit.tokens[i]), default=0.0) or 1.0
        for i in rows:
            line, texts = Text(), completions[i].tokens or ("  ",) * len(credit.tokens[i])
            for text, value in zip(texts, credit.tokens[i], strict=True):
                line.append(text.replace("\n", "↵") if console.is_terminal else f"{value:+.2f} ", _color(value / scale))
            console.print(line)


def _color(share: float) -> str:
    """Return a style with a blue background for positive and an orange one for negative credit, legible in black.

    Args:
        share: credit in [-1, 1].
    """
    # At most 150 darker than white, so that black text stays legible.
    faint = round(255 - 150 * abs(share))
    return (
        f"black on rgb({faint},{(255 + faint) // 2},255)"
        if share >= 0
        else f"black on rgb(255,{faint},{faint // 2 + 40})"
    )
