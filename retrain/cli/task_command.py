"""Commands about tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrain.cli.config_commands import Json, Overrides


def export(  # noqa: PLR0913 - its options, each with its name
    file: Annotated[
        Path | None, typer.Argument(help="TOML file that names the task; the default task without.")
    ] = None,
    *,
    solutions: Annotated[Path, typer.Option(help="The .jsonl file to write.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Rows to write.")] = 1000,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the problems; that of [training] if not given.")] = None,
    form: Annotated[
        Literal["messages", "prompt"], typer.Option("--format", help="Chat messages, or prompt and completion.")
    ] = "messages",
    correct_only: Annotated[
        bool, typer.Option("--correct-only", help="Leave out solutions that the rewards do not call correct.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write a task's worked solutions as expert data for [expert] path; held-out problems are never among them."""
    from retrain.config.document import Document, read
    from retrain.config.load import validate
    from retrain.tools.worked_solutions import export_solutions

    document = read(file, overrides or ()) if file is not None else Document("defaults")
    for override in overrides or () if file is None else ():
        document.override(override)
    loaded = validate(document)
    seed = loaded.config.training.seed if seed is None else seed
    done = export_solutions(loaded, solutions, count, seed=seed, form=form, correct_only=correct_only)
    if as_json:
        print(json.dumps({"file": str(solutions)} | vars(done)))
    else:
        print(f"wrote {done.rows:,} rows to {solutions}, from {done.solutions:,} solutions")
