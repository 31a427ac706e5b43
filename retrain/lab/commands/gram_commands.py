"""The command that extracts strategic grams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrain.cli.arguments import Json
from retrain.system.terminal import say

_SENTENCE_TRANSFORMER = "sentence-transformers/all-MiniLM-L6-v2"
"""Default embedder with `--literal`."""
_TF_IDF = "tf-idf"

_Names = Annotated[
    list[str] | None, typer.Argument(help=".jsonl, .jsonl.gz or .parquet files, run directories, or a data set.")
]
_Least = Annotated[
    float | None, typer.Option(help="Lowest reward of a successful solution.", show_default="1, if rows have rewards")
]
_Rate = Annotated[float, typer.Option(min=1, help="Largest mean count of a gram in the solutions that contain it.")]
_Embedder = Annotated[
    str | None,
    typer.Option(
        help="A sentence-transformer: a directory, or OWNER/NAME on the hub; or tf-idf.", show_default=_TF_IDF
    ),
]
_Literal = Annotated[
    bool, typer.Option("--literal", help="Cluster all n-grams with a sentence-transformer, and prune nothing.")
]


def extract(  # noqa: PLR0913 - the recipe's keys are its options
    files: _Names = None,
    out: Annotated[Path, typer.Option("--out", "--output-path", help="The JSON file to write.")] = Path("grams.json"),
    source: Annotated[Literal["files", "hub"], typer.Option(help="FILES are files, or a hub data set.")] = "files",
    dataset_name: Annotated[str | None, typer.Option(help="The same as --source hub NAME.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set: train, or train[:5000].")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of the data set.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of the data set.")] = None,
    column: Annotated[str | None, typer.Option(help="Column with the solution.", show_default="solution, text")] = None,
    reward_column: Annotated[str, typer.Option(help="Column with the reward.")] = "reward",
    min_reward: _Least = None,
    task: Annotated[str | None, typer.Option(help="Use correct solutions of this task instead of files.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of solutions, with --task.")] = 2000,
    n_min: Annotated[int, typer.Option(min=1, help="Smallest number of words of a gram.")] = 3,
    n_max: Annotated[int, typer.Option(min=1, help="Largest number of words of a gram.")] = 5,
    min_df: Annotated[float, typer.Option(min=0, max=1, help="Share of solutions a gram must occur in.")] = 0.01,
    max_per_doc_rate: _Rate = 3.0,
    max_grams: Annotated[int, typer.Option(min=1, help="Largest number of grams; the most frequent are kept.")] = 200,
    lowercase: Annotated[bool, typer.Option(help="Ignore upper and lower case.")] = True,
    clusters: Annotated[int, typer.Option("--clusters", "--n-clusters", min=1, help="Clusters of k-means.")] = 100,
    top_percentile: Annotated[float, typer.Option(min=0.0, max=1, help="Share of clusters that are kept.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of k-means, and of the task's problems.")] = 0,
    embedder: _Embedder = None,
    literal: _Literal = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a chart, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Extract strategic grams from successful solutions, for [planning] strategic_grams_path.

    N-grams that occur in enough solutions are clustered by meaning, and the clusters that occur in most solutions are
    kept. Prints the share of the text that the grams cover.
    """
    from retrain.lab.grams import gram_files as grams
    from retrain.lab.grams.gram_extraction import Recipe
    from retrain.lab.grams.gram_extraction import extract as extract_grams

    names, hub = _names(files or [], source, dataset_name)
    _check_grams([bool(names), hub is not None, task is not None], n_min, n_max)
    # tf-idf is the default otherwise, because it needs no download.
    embedder = _SENTENCE_TRANSFORMER if literal and embedder is None else embedder
    shape = (n_min, n_max, min_df, max_per_doc_rate, max_grams, lowercase)
    recipe = Recipe(*shape, clusters, top_percentile, seed, None if embedder == _TF_IDF else embedder, literal)
    if task is not None:
        solutions, sources = grams.task_solutions(task, count, seed), [f"task {task}"]
    else:
        read = grams.HubSplit(hub, split, config, revision) if hub is not None else grams.Files(names)
        reading = grams.SolutionFormat(column, reward_column, min_reward)
        solutions, sources = grams.solutions_in(read.rows(), reading, str(read)), read.names
    extraction = extract_grams(solutions, recipe)
    covered = grams.coverage(extraction.grams, solutions)
    written = json.dumps(grams.document(extraction, recipe, covered, sources), indent=1, ensure_ascii=False)
    grams.write(out, written + "\n")
    if plot is not None:
        grams.write(plot, grams.plot(extraction))
    chart = f" and a chart to {plot}" if plot else ""
    say(
        written
        if as_json
        else f"{grams.report(extraction, covered)}\nwrote {len(extraction.grams)} grams to {out}{chart}"
    )


def _names(names: list[str], source: str, dataset_name: str | None) -> tuple[list[Path], str | None]:
    """Return the files to read, or the name of the data set on the hub."""
    if dataset_name is not None:
        names, source = [*names, dataset_name], "hub"
    if source == "files":
        return [Path(name) for name in names], None
    if len(names) != 1:
        raise typer.BadParameter("--source hub takes the name of one data set", param_hint="FILES")
    return [], names[0]


def _check_grams(sources: list[bool], n_min: int, n_max: int) -> None:
    """Check combinations of options."""
    if sum(sources) != 1:
        raise typer.BadParameter("give files, --task NAME, or --source hub NAME", param_hint="FILES")
    # Without this the extraction would fail only after it has read all files.
    if n_min > n_max:
        raise typer.BadParameter(f"{n_min} is above --n-max {n_max}", param_hint="--n-min")
