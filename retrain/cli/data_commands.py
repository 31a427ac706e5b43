"""The command data prepare: files of problems for this and other trainers."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from retrain.errors import ConfigError, ConfigProblem, DataError, MissingExtraError


class Source(StrEnum):
    """Where problems come from: a task that makes them, a file, or a data set of the hub."""

    builtin = "builtin"
    jsonl = "jsonl"
    parquet = "parquet"
    hub = "hub"


_KEYS = {Source.jsonl: "path", Source.parquet: "path", Source.hub: "name"}
"""The parameter of its task that says which."""

Size = Annotated[int | None, typer.Option(min=1, help="At most so many; all rows, or 200 and 50 of a built-in task.")]


def data(  # noqa: PLR0913 - one option each
    what: Annotated[str | None, typer.Argument(help="The file, or the id of the data set.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("data"),
    source: Annotated[Source, typer.Option(help="Kind of source.")] = Source.builtin,
    task: Annotated[str, typer.Option(help="The task, where the source is built in.")] = "addition",
    train_size: Size = None,
    val_size: Size = None,
    seed: Annotated[int, typer.Option(help="Of the training problems and their order.")] = 0,
    data_source: Annotated[str | None, typer.Option(help="Its name in the rows; the source's if left out.")] = None,
    ability: Annotated[str, typer.Option(help="What the rows say they test.")] = "math",
    final: Annotated[bool, typer.Option("--final-answer", help="Answers are what follows the last ####.")] = False,
    parquet: Annotated[bool, typer.Option(help="Also write parquet files.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files with other contents.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the task: hub.split=train. Repeatable.")
    ] = None,
) -> None:
    """Write train and val files (jsonl, parquet) that retrain, verl and slime read.

    For instance: retrain data prepare --out data --source jsonl problems.jsonl --val-size 100
    """
    from retrain.tools.prepared_data import as_jsonl, final_answer, publish, rows, select

    train, val = select(_task(source, what, task, seed, overrides or []), train_size, val_size)
    if final:
        train, val = ([final_answer(problem) for problem in side] for side in (train, val))
    name = data_source or what or task
    parts = {split: rows(side, split, name, ability) for split, side in (("train", train), ("val", val))}
    files = {f"{split}.jsonl": as_jsonl(part) for split, part in parts.items()}
    files |= _parquet(parts) if parquet else {}
    publish(out, files, force)
    for split, part, size in (("train", train, train_size), ("val", val, val_size)):
        short = f" of {size:,} asked for: the source has no more" if size and len(part) < size else ""
        written = ", ".join(str(out / file) for file in files if file.startswith(split))
        print(f"{written}: {len(part):,} rows{short}")


def _task(source: Source, what: str | None, name: str, seed: int, overrides: list[str]) -> Any:
    from retrain.tools.parameters import Parameters

    if (what is None) != (source is Source.builtin):
        problem = f"--source {source} {'takes no file or id' if what else 'needs one'}"
        fix = "retrain data prepare --source jsonl problems.jsonl, or --source builtin --task addition"
        raise ConfigError([ConfigProblem("retrain data prepare", 0, 0, what or "--source", problem, fix)])
    parameters = Parameters(overrides)
    chosen = name if what is None else source.value
    given = {} if what is None else {_KEYS[source]: what, "heldout_fraction": 0.0}
    bound = parameters.bind("task", chosen, **given)
    parameters.refuse_unread()
    return bound.build({"seed": seed})


def _parquet(parts: dict[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """Parquet files, or none with a message why not."""
    from retrain.tools.prepared_data import as_parquet

    try:
        return {f"{split}.parquet": as_parquet(part) for split, part in parts.items()}
    except MissingExtraError as error:
        print(f"no parquet files: {error}", file=sys.stderr)
        return {}
    except DataError as error:
        raise DataError(f"{error}; drop it from the source, or write jsonl alone with --no-parquet") from error
