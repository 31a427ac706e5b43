"""The command of process reward models: prm score."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.config_commands import Json


def _above_0(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is no finite number above 0")
    return value


def score(  # noqa: PLR0913 - the options of the command
    model: Annotated[str, typer.Argument(help="The model, as in runs/NAME/model/process_rewards.", show_default=False)],
    solutions: Annotated[Path, typer.Argument(help="A jsonl file of prompts and solutions.", show_default=False)],
    reference: Annotated[
        str | None, typer.Option(help="What it is compared with; unset: the folder reference/ in it.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(callback=_above_0, help="Scale of the rewards; unset: that of training.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this jsonl file.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also the reward of every token.")] = False,
    as_json: Json = False,
) -> None:
    """Score solutions with a process reward model that was trained beside a policy.

    Rows have a prompt with a solution, completion or text, or messages; `correct` or `reward` gives the accuracy over
    pairs of a right and a wrong solution of one prompt.
    """
    from retrain.tools.prm_scores import score_file, summary

    rows = score_file(solutions, model, reference, beta)
    facts = [row.facts(tokens) for row in rows]
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in facts), encoding="utf-8")
    if as_json:
        print(json.dumps({"rows": facts, "summary": summary(rows)}))
        return
    for row in rows if out is None else ():
        print(f"line {row.line}  r_phi {row.r_phi:+.4f}  mean {row.mean:+.5f}  tokens {row.length}")
        for text, value in row.rewards if tokens else ():
            print(f"  {value:+.5f}  {text!r}")
    print("  ".join(f"{name} {value:.4g}" for name, value in summary(rows).items()))
