"""`retrain grams extract`: strategic grams from solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.config_commands import Json


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

    _check(files, task, n_min, n_max)
    shape = (n_min, n_max, min_df, max_per_doc_rate, max_grams, lowercase)
    recipe = Recipe(*shape, clusters, top_percentile, seed, embedder)
    solutions, sources = grams.gather(files or (), grams.Reading(column, reward_column, min_reward), task, count, seed)
    found = extract_grams(solutions, recipe)
    covered = grams.coverage(found.grams, solutions)
    written = json.dumps(grams.document(found, recipe, covered, sources), indent=1, ensure_ascii=False)
    grams.write(out, written + "\n")
    if plot is not None:
        grams.write(plot, grams.plot(found))
    chart = f" and a chart to {plot}" if plot else ""
    print(written if as_json else f"{grams.report(found, covered)}\nwrote {len(found.grams)} grams to {out}{chart}")


def _check(files: list[Path] | None, task: str | None, n_min: int, n_max: int) -> None:
    """What no single option can tell."""
    if bool(files) == bool(task):
        raise typer.BadParameter("give files, or --task NAME", param_hint="FILES")
    if n_min > n_max:
        raise typer.BadParameter(f"{n_min} is above --n-max {n_max}", param_hint="--n-min")
