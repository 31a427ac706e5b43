"""Commands that score files: stored rollouts, and solutions by a process reward model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from retrain.cli.arguments import Json
from retrain.system.files import writing
from retrain.system.terminal import say

_MEANING = {
    "pass@1": "first rollout of each problem",
    "avg@n": "mean over problems of the share of correct rollouts",
    "avg_tokens": "over all rollouts",
}
"""Metric -> its meaning."""


def score(  # noqa: PLR0913 - the options of the command
    file: Annotated[
        Path | None,
        typer.Argument(help="A run; or JSON lines: predictions, lengths, ground_truth.", show_default=False),
    ] = None,
    results: Annotated[Path | None, typer.Option("--results", help="The same as the argument.")] = None,
    base: Annotated[
        Path | None, typer.Option("--base", "--base-results", help="Rollouts of another model on the same problems.")
    ] = None,
    ks: Annotated[list[int] | None, typer.Option("--k", min=1, help="Also report pass@K. Repeatable.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of a run's evaluation to score; unset: the last evaluation.")
    ] = None,
    eval_set: Annotated[str, typer.Option(help="Name of a run's entry of [[eval.sets]] to score.")] = "",
    equivalence: Annotated[
        Literal["recorded", "simple", "symbolic"],
        typer.Option(help="Comparison of answers; recorded: the result of the run's rewards."),
    ] = "recorded",
    as_json: Json = False,
) -> None:
    """Score stored completions: pass@1, pass@k, avg@n and tokens with 95% intervals; against a base, the AES.

    For a run these are the completions of its last evaluation, which are in runs/NAME/eval/.
    """
    from retrain.tools.rollout_scores import compare, results_file, score_file, summarize

    wanted = ks or ()
    if (given := file or results) is None or (file and results):
        raise typer.BadParameter("name one file or run to score, as the argument or after --results")
    file = results_file(given, step, eval_set)
    score = score_file(str(file), wanted, equivalence)
    facts: dict[str, Any] = summarize(score, wanted)
    if base is not None:
        base = results_file(base, step, eval_set)
        other = score_file(str(base), wanted, equivalence)
        facts |= {"base": summarize(other, wanted), **compare(score, other, wanted)}
    if as_json:
        say(json.dumps(facts, indent=2))
        return
    _print_one(facts, str(file))
    if base is not None:
        _print_one(facts["base"], str(base))
        _print_comparison(facts)


def _print_one(facts: Mapping[str, Any], name: str) -> None:
    say(f"{name}: {facts['problems']} problems, {facts['rollouts']} rollouts")
    for metric, value in facts.items():
        if isinstance(value, dict) and metric in (*_MEANING, *(key for key in facts if key.startswith("pass@"))):
            meaning = _MEANING.get(metric, "unbiased: at least one of k rollouts is correct")
            say(f"{metric:>12}  {_with_interval(metric, value):<36}{meaning}")
    if facts["failed"]:
        say(f"{'failed':>12}  {facts['failed']} comparisons timed out or raised an error; they count as wrong")


def _print_comparison(facts: Mapping[str, Any]) -> None:
    for key in ("aes", "aes_avg"):
        row = facts[key]
        say(f"AES from {row['of']}: {row['value']:+.4f}")
        change = f"{row['base_tokens']:.1f} -> {row['tokens']:.1f} tokens"
        say(f"{row['length_part']:>+12.4f}  length: {change}, relative to the base")
        change = f"{row['base_accuracy']:.1%} -> {row['accuracy']:.1%}"
        say(f"{row['accuracy_part']:>+12.4f}  accuracy: {change}, relative to the base, x 3 for a gain, x 5 for a loss")
    say(f"Differences on {facts['pairs']} problems of both files ({facts['unpaired']} rows without a partner)")
    for metric, value in facts["paired"].items():
        say(f"{metric:>12}  {_with_interval(metric, value, sign='+')}")


def _with_interval(metric: str, value: Mapping[str, Any], sign: str = "") -> str:
    # All metrics but the number of tokens are shares.
    form = f"{sign}.1f" if metric == "avg_tokens" else f"{sign}.1%"
    if value["low"] is None:
        return f"{value['value']:{form}}  (one problem: no interval)"
    # An interval without width would look like a measurement of perfect precision.
    if sign and value["low"] == value["high"]:
        return f"{value['value']:{form}}  (the same on every problem)"
    return f"{value['value']:{form}}  [{value['low']:{form}}, {value['high']:{form}}]"


def _above_0(value: float | None) -> float | None:
    """Validate an option that must be a finite number above 0."""
    # NaN fails the comparison, too.
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is not a finite number above 0")
    return value


def score_solutions(  # noqa: PLR0913 - the options of the command
    model: Annotated[str, typer.Argument(help="The model, as in runs/NAME/model/process_rewards.", show_default=False)],
    solutions: Annotated[Path, typer.Argument(help="A jsonl file of prompts and solutions.", show_default=False)],
    reference: Annotated[
        str | None, typer.Option(help="The reference model; unset: the folder reference/ in the model's.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(callback=_above_0, help="Scale of the rewards; unset: the one used in training.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this jsonl file.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print the reward of every token.")] = False,
    as_json: Json = False,
) -> None:
    """Score solutions with a process reward model that was trained with a policy.

    A row has a prompt and a solution, completion or text; or it has messages. If rows have `correct` or `reward`, the
    accuracy over pairs of a correct and a wrong solution of the same prompt is reported as well.
    """
    from retrain.tools.prm_scores import score_file, summary

    rows = score_file(solutions, model, reference, beta)
    facts = [row.facts(tokens) for row in rows]
    if out is not None:
        with writing(out):
            out.write_text("".join(json.dumps(row) + "\n" for row in facts), encoding="utf-8")
    if as_json:
        say(json.dumps({"rows": facts, "summary": summary(rows)}))
        return
    # The file has the rows, so only the summary is printed.
    for row in rows if out is None else ():
        say(f"line {row.line}  r_phi {row.r_phi:+.4f}  mean {row.mean:+.5f}  tokens {row.length}")
        for text, value in row.rewards if tokens else ():
            say(f"  {value:+.5f}  {text!r}")
    say("  ".join(f"{name} {value:.4g}" for name, value in summary(rows).items()))
