"""Commands that write data: problems for trainers, worked solutions, strategic grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrain.cli.arguments import Json, Overrides
from retrain.errors import ConfigError, ConfigProblem, DataError, MissingExtraError
from retrain.system.terminal import say

DataSource = Literal["builtin", "jsonl", "parquet", "hub"]
"""Where problems come from: a task that makes them, a file, or a data set of the hub."""

_KEYS: dict[DataSource, str] = {"jsonl": "path", "parquet": "path", "hub": "name"}
"""The parameter of its task that says which."""

Size = Annotated[int | None, typer.Option(min=1, help="At most so many; all rows, or 200 and 50 of a built-in task.")]


def data(  # noqa: PLR0913 - one option each
    what: Annotated[str | None, typer.Argument(help="The file, or the id of the data set.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("data"),
    source: Annotated[DataSource, typer.Option(help="Kind of source.")] = "builtin",
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
        say(f"{written}: {len(part):,} rows{short}")


def _task(source: DataSource, what: str | None, name: str, seed: int, overrides: list[str]) -> Any:
    from retrain.tools.parameters import Parameters

    if (what is None) != (source == "builtin"):
        problem = f"--source {source} {'takes no file or id' if what else 'needs one'}"
        fix = "retrain data prepare --source jsonl problems.jsonl, or --source builtin --task addition"
        raise ConfigError([ConfigProblem("retrain data prepare", 0, 0, what or "--source", problem, fix)])
    parameters = Parameters(overrides)
    given = {} if what is None else {_KEYS[source]: what, "heldout_fraction": 0.0}
    bound = parameters.bind("task", name if what is None else source, **given)
    parameters.refuse_unread()
    return bound.build({"seed": seed})


def _parquet(parts: dict[str, list[dict[str, Any]]]) -> dict[str, bytes]:
    """Parquet files, or none with a message why not."""
    from retrain.tools.prepared_data import as_parquet

    try:
        return {f"{split}.parquet": as_parquet(part) for split, part in parts.items()}
    except MissingExtraError as error:
        say(f"no parquet files: {error}", error=True)
        return {}
    except DataError as error:
        raise DataError(f"{error}; drop it from the source, or write jsonl alone with --no-parquet") from error


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
        say(json.dumps({"file": str(solutions)} | vars(done)))
    else:
        say(f"wrote {done.rows:,} rows to {solutions}, from {done.solutions:,} solutions")


def extract(  # noqa: PLR0913 - the recipe's keys are its options
    files: Annotated[
        list[Path] | None, typer.Argument(help=".jsonl, .jsonl.gz or .parquet, or a run's directory.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("grams.json"),
    column: Annotated[str | None, typer.Option(help="Column with the solution.", show_default="solution, text")] = None,
    reward_column: Annotated[str, typer.Option(help="Column with the reward.")] = "reward",
    min_reward: Annotated[
        float | None, typer.Option(help="Least reward of a successful solution.", show_default="1, if there are any")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Take right solutions of this task instead of files.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many, with --task.")] = 2000,
    n_min: Annotated[int, typer.Option(min=1, help="Fewest words of a gram.")] = 3,
    n_max: Annotated[int, typer.Option(min=1, help="Most words of a gram.")] = 5,
    min_df: Annotated[float, typer.Option(min=0, max=1, help="Share of solutions a gram must occur in.")] = 0.01,
    max_per_doc_rate: Annotated[
        float, typer.Option(min=1, help="Most occurrences in a solution that holds it, on average.")
    ] = 3.0,
    max_grams: Annotated[int, typer.Option(min=1, help="Most grams, those of most solutions first.")] = 200,
    lowercase: Annotated[bool, typer.Option(help="Fold upper and lower case.")] = True,
    clusters: Annotated[int, typer.Option(min=1, help="Clusters of k-means.")] = 100,
    top_percentile: Annotated[float, typer.Option(min=0.0, max=1, help="Share of clusters that are kept.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of k-means, and of the task's problems.")] = 0,
    embedder: Annotated[
        str | None, typer.Option(help="Directory of a sentence-transformer.", show_default="TF-IDF")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write a chart, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Extract strategic grams from successful solutions, for [planning] strategic_grams_path.

    N-grams that enough solutions hold are clustered by meaning, and the clusters that occur in most solutions are
    kept. Prints how much of the text the grams cover.
    """
    from retrain.tools import gram_files as grams
    from retrain.tools.gram_extraction import Recipe
    from retrain.tools.gram_extraction import extract as extract_grams

    _check_grams(files, task, n_min, n_max)
    shape = (n_min, n_max, min_df, max_per_doc_rate, max_grams, lowercase)
    recipe = Recipe(*shape, clusters, top_percentile, seed, embedder)
    solutions, sources = grams.gather(
        files or (), grams.SolutionFormat(column, reward_column, min_reward), task, count, seed
    )
    found = extract_grams(solutions, recipe)
    covered = grams.coverage(found.grams, solutions)
    written = json.dumps(grams.document(found, recipe, covered, sources), indent=1, ensure_ascii=False)
    grams.write(out, written + "\n")
    if plot is not None:
        grams.write(plot, grams.plot(found))
    chart = f" and a chart to {plot}" if plot else ""
    say(written if as_json else f"{grams.report(found, covered)}\nwrote {len(found.grams)} grams to {out}{chart}")


def _check_grams(files: list[Path] | None, task: str | None, n_min: int, n_max: int) -> None:
    """What no single option can tell."""
    if bool(files) == bool(task):
        raise typer.BadParameter("give files, or --task NAME", param_hint="FILES")
    if n_min > n_max:
        raise typer.BadParameter(f"{n_min} is above --n-max {n_max}", param_hint="--n-min")
