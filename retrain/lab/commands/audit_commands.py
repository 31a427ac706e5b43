"""The command that audits credit assignment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.arguments import Json, Overrides, Trust
from retrain.cli.trained_commands import RunPath, only_warnings
from retrain.errors import ConfigError
from retrain.system.files import write_text, writing
from retrain.system.terminal import say

if TYPE_CHECKING:
    from retrain.lab.audit.credit_audit import Audit


def audit(  # noqa: PLR0913 - the options of the command
    run: RunPath,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods, comma-separated: advantages, transforms, ADVANTAGE+TRANSFORM, dotted paths."),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; 0 is the start of the run.")] = None,
    every: Annotated[bool, typer.Option("--all-checkpoints", help="Audit the start and every checkpoint.")] = False,
    batches: Annotated[int, typer.Option(min=4, help="Number of batches, each of the run's size.")] = 16,
    continuations: Annotated[int, typer.Option(min=2, help="Number of continuations of every prefix.")] = 8,
    html: Annotated[Path | None, typer.Option(help="Write a page with the credit of tokens.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Write its figures to this folder, as SVG and, with resvg-py, PNG.")
    ] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the tables for a paper.")] = None,
    overrides: Overrides = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare methods of credit assignment with the true advantages, without training.

    True advantages are estimated from continuations of every prefix. The effective batch is how many times larger
    grpo's batch would have to be for an equally good gradient. --json prints one line per checkpoint.
    """
    from retrain.api import reopen

    audits: list[Audit] = []
    for directory, trained in _places(run, step, every):
        context = reopen(directory, overrides or (), only_warnings, "all" if trained else "initial", trust=trust)
        from retrain.lab.audit.credit_audit import audit as judge

        try:
            wanted = methods.split(",") if methods else ()
            audits.append(judge(context, run, wanted, batches, continuations, lambda line: say(line, error=True)))
        finally:
            context.close()
        say(json.dumps(audits[-1].facts()) if as_json else _text(audits[-1]))
    for file, made in ((html, _page), (latex, _latex)):
        if file is not None:
            with writing(file):
                write_text(file, made(audits))
            say(f"{file}: written", error=as_json)
    if figures is not None:
        from retrain.lab.audit.audit_page import exported
        from retrain.report.exported_figures import write_figures

        with writing(figures):
            write_figures(figures, exported(audits))


def _page(audits: Sequence[Audit]) -> str:
    from retrain.lab.audit.audit_page import page

    return page(audits)


def _latex(audits: Sequence[Audit]) -> str:
    """Return a table for each checkpoint."""
    from retrain.lab.audit.audit_page import HEADINGS, cells
    from retrain.report.latex import tables
    from retrain.report.page import Table

    columns = ("method", *HEADINGS)
    return tables(
        {
            _head(audit): Table(columns, [[name, *cells(figures)] for name, figures in audit.methods.items()])
            for audit in audits
        }
    )


def _head(audit: Audit) -> str:
    return f"{audit.run}, step {audit.step}: reliability of the measured advantages {audit.reliability:.2f}"


def _places(run: Path, step: int | None, every: bool) -> Iterator[tuple[Path, bool]]:
    """Yield the directories to open, each with True if its trained weights are used, False for the initial ones."""
    from retrain.storage.checkpoint import is_one, step_of

    folders = (run / "checkpoints").glob("step-*")
    checkpoints = [folder for folder in folders if is_one(folder) and not folder.suffix]
    by_step = dict(sorted((step_of(checkpoint), checkpoint) for checkpoint in checkpoints))
    if step is not None and step not in (0, *by_step):
        has = ", ".join(map(str, by_step)) or "none"
        raise ConfigError.at(run, "--step", f"no checkpoint of step {step}", f"0, or of {has}")
    # Step 0 has no checkpoint: it is the run's initial weights.
    if step == 0 or every:
        yield run, False
    yield from ((checkpoint, True) for number, checkpoint in by_step.items() if every or number == step)
    # Without an option the final model counts, which may be newer than the newest checkpoint.
    if step is None and not (every and by_step):
        yield run, True


def _text(audit: Audit) -> str:
    from retrain.lab.audit.audit_page import HEADINGS, cells, placebo_lines

    lines = [["", *HEADINGS], *([name, *cells(verdict)] for name, verdict in audit.methods.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([_head(audit), *table, *placebo_lines(audit)])
