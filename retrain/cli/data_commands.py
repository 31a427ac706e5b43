"""Commands that write data: problems for trainers, worked solutions, strategic grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrain.cli.arguments import Json, Overrides
from retrain.errors import ConfigError, DataError, MissingExtraError
from retrain.system.terminal import say

DataSource = Literal["builtin", "jsonl", "parquet", "hub", "config"]
"""Sources of problems: a task that generates them, a file, a data set of the hub, or the tasks of a run file."""

_KEYS: dict[DataSource, str] = {"jsonl": "path", "parquet": "path", "hub": "name"}
"""Source -> the parameter of its task that names the file or the data set."""

Size = Annotated[int | None, typer.Option(min=1, help="Most rows; unset: all rows, or 200 and 50 of a built-in task.")]
_Origin = Annotated[str | None, typer.Argument(help="The file, the id of the data set, or the run file.")]


def data(  # noqa: PLR0913 - one option each
    origin: _Origin = None,
    out: Annotated[Path, typer.Option("--out", "--output-dir", help="Folder to write into.")] = Path("data/processed"),
    source: Annotated[DataSource | None, typer.Option(help="Kind of source. [default: builtin]")] = None,
    builtin: Annotated[bool, typer.Option("--builtin", "--builtin-only", help="The same as --source builtin.")] = False,
    task: Annotated[str, typer.Option(help="The task of --source builtin.")] = "addition",
    train_size: Size = None,
    val_size: Size = None,
    seed: Annotated[int, typer.Option(help="Seed of the training problems and their order.")] = 0,
    data_source: Annotated[str | None, typer.Option(help="The rows' data_source; unset: the source's name.")] = None,
    ability: Annotated[str, typer.Option(help="The rows' ability, which names the skill that they test.")] = "math",
    final: Annotated[
        bool, typer.Option("--final-answer", help="Keep of answers only the text after the last ####.")
    ] = False,
    parquet: Annotated[bool, typer.Option(help="Also write parquet files.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the task: hub.split=train. Repeatable.")
    ] = None,
) -> None:
    """Write train and val files (jsonl, parquet) that retrain, verl and slime read.

    For instance: retrain data prepare --source jsonl problems.jsonl --val-size 100. With --source config the problems
    are those of a run file, which may mix [[tasks]], and each of its [[eval.sets]] becomes test_NAME.jsonl.
    """
    from retrain.tools.prepared_data import as_jsonl, divide, final_answer, publish, rows

    # Nothing on the command line says which problems these are.
    if source is None and not builtin and origin is None:
        say(f'built-in task "{task}"; --source names other problems, such as a data set of the hub')
    kind: DataSource = "builtin" if builtin else source or "builtin"
    training, sets = _tasks(kind, origin, task, seed, overrides or [])
    splits = divide(training, sets, train_size, val_size)
    if final:
        splits = {split: [final_answer(problem) for problem in side] for split, side in splits.items()}
    name = data_source or (Path(origin).stem if origin and kind == "config" else origin) or task
    # The rows of an evaluation set are named after it.
    named = {split: split.removeprefix("test_") if split.startswith("test_") else name for split in splits}
    parts = {split: rows(side, split, named[split], ability) for split, side in splits.items()}
    files = {f"{split}.jsonl": as_jsonl(part) for split, part in parts.items()}
    files |= _parquet(parts) if parquet else {}
    publish(out, files, force)
    for split, part in parts.items():
        size = {"train": train_size, "val": val_size}.get(split)
        short = f" of {size:,} asked for: the source has no more" if size and len(part) < size else ""
        written = ", ".join(str(out / file) for file in files if file.startswith(f"{split}."))
        say(f"{written}: {len(part):,} rows{short}")


def _tasks(
    source: DataSource, origin: str | None, name: str, seed: int, overrides: list[str]
) -> tuple[Any, dict[str, tuple[Any, int]]]:
    """Build the task to write, and the task of each evaluation set of a run file.

    Returns:
        (task, name of each evaluation set -> (its task, number of held-out problems)).
    Raises:
        ConfigError: an argument is missing or superfluous, or the run file is invalid.
    """
    from retrain.tools.parameters import Parameters

    if (origin is None) != (source == "builtin"):
        problem = f"--source {source} {'takes no file or id' if origin else 'needs one'}"
        fix = "retrain data prepare --source jsonl problems.jsonl, or --source builtin --task addition"
        raise ConfigError.at("retrain data prepare", origin or "--source", problem, fix)
    if source == "config":
        from retrain.config.load import load

        loaded = load(str(origin), overrides)
        return loaded.task(seed), {
            name: (config.task(seed), config.config.eval.problems) for name, config in loaded.sets.items()
        }
    parameters = Parameters(overrides)
    # The task holds out nothing, so that `divide` itself chooses the validation rows.
    given = {} if origin is None else {_KEYS[source]: origin, "heldout_fraction": 0.0}
    chosen = parameters.bind("task", name if origin is None else source, **given)
    parameters.refuse_unread()
    return chosen.build({"seed": seed}), {}


def _parquet(parts: dict[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """Return the content of the parquet files; none, after printing the reason, if pyarrow is not installed.

    Raises:
        DataError: a row cannot be stored in a parquet file.
    """
    from retrain.tools.prepared_data import as_parquet

    try:
        return {f"{split}.parquet": as_parquet(part) for split, part in parts.items()}
    # retrain itself reads the jsonl files, so the command goes on.
    except MissingExtraError as error:
        say(f"no parquet files: {error}", error=True)
        return {}
    except DataError as error:
        raise DataError(f"{error}; drop it from the source, or write only jsonl with --no-parquet") from error


def export(  # noqa: PLR0913 - its options, each with its name
    file: Annotated[Path | None, typer.Argument(help="TOML file that names the task; unset: the default task.")] = None,
    *,
    solutions: Annotated[Path, typer.Option(help="The .jsonl file to write.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Rows to write.")] = 1000,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the problems; unset: that of [training].")] = None,
    form: Annotated[
        Literal["messages", "prompt"], typer.Option("--format", help="Chat messages, or prompt and completion.")
    ] = "messages",
    correct_only: Annotated[
        bool, typer.Option("--correct-only", help="Leave out solutions that the rewards do not judge correct.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write a task's worked solutions as expert data for [expert] path, without those of held-out problems."""
    from retrain.config.document import Document, read
    from retrain.config.load import validate
    from retrain.tools.worked_solutions import export_solutions

    document = read(file, overrides or ()) if file is not None else Document("defaults")
    # `read` has applied them to a file.
    document.override_all(overrides or () if file is None else ())
    # Unlike `load`, this accepts keys that nothing reads: the file may be made for another task.
    loaded = validate(document)
    seed = loaded.config.training.seed if seed is None else seed
    done = export_solutions(loaded, solutions, count, seed=seed, form=form, correct_only=correct_only)
    if as_json:
        say(json.dumps({"file": str(solutions)} | vars(done)))
    else:
        say(f"wrote {done.rows:,} rows to {solutions}, from {done.solutions:,} solutions")
