"""Commands about formulas: verify tries their properties, credit compares what they give."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from retrain.cli.read import Json


def verify(
    trials: Annotated[int, typer.Option(min=1, help="Random inputs per check.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Try the formulas' properties on random inputs: one line each, exit code 1 if one fails."""
    from retrain.run.verify import verify as checks

    rows = list[dict[str, object]]()
    for check in checks(trials, seed):
        rows.append({**asdict(check), "ok": check.ok})
        if not as_json:
            bound = f"above {check.limit:g}" if check.above else f"at most {check.limit:g}"
            print(f"{'ok' if check.ok else 'FAILED':<7} {check.name:<74} {check.figure:9.2e}  ({bound})", flush=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)
