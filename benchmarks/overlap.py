"""A step with `[rollout] overlap` 0 and 1, one thread for the trainer and one for the sampler, on two cores.

The two alternate, each in a fresh process from the same warm-started weights; a ratio pairs the medians of one
repetition. With the builtin model's defaults sampling takes about half as long as credit and update together, and
the weights that correct for staleness need a scoring forward of their own.
The load of the machine is printed beside the figures: each of the two needs a core of its own.

    python benchmarks/overlap.py --steps 12 --repetitions 6
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from step import SETTLING, Retrain, Stopwatch, prepare

PHASES = ("time/step_s", "time/rollout_s", "time/wait_s", "time/credit_s", "time/update_s")
EXTRA = {0: "", 1: "rollout = { overlap = 1 }"}


def one(model: Path, dtype: str, steps: int, overlap: int) -> list[dict[str, float]]:
    """Seconds of every step of a run, by phase, and its tokens."""
    from retrain.config.load import load
    from retrain.run.session import Resume, run

    stopwatch = Stopwatch()

    def observe(event: str, details: Any) -> None:
        if event == "step":
            stopwatch.lap(**{name: details.get(name, 0.0) for name in (*PHASES, "tokens/response")})

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.toml"
        config.write_text(f"{EXTRA[overlap]}\n{Retrain().toml(model, dtype, steps, folder)}")
        run(load(config), Resume(), observe)
    return stopwatch.rows


def measure(model: Path, dtype: str, steps: int, overlap: int) -> dict[str, float]:
    """Medians of one repetition in its own process, without the first steps and the last, which samples nothing."""
    command = [sys.executable, __file__, "--one", str(overlap), "--dtype", dtype, "--model", str(model)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--steps", str(steps + SETTLING + 1)], env=os.environ | threads, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"overlap = {overlap} failed:\n{done.stderr[-3000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])[SETTLING:-1]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def compare(arguments: argparse.Namespace, model: Path) -> None:
    """Alternate, and print the phases and the ratio."""
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    loads: list[float] = []
    for repetition in range(arguments.repetitions):
        for overlap in (0, 1) if repetition % 2 == 0 else (1, 0):
            found[overlap].append(measure(model, arguments.dtype, arguments.steps, overlap))
            loads.append(os.getloadavg()[0])
            text = {name: round(value, 3) for name, value in found[overlap][-1].items()}
            print(f"overlap {overlap}", text, f"load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    names = list(found[0][0])
    print(f"{'overlap':10}" + "".join(f"{name.removeprefix('time/'):>16}" for name in names))
    for overlap, rows in found.items():
        middle = [statistics.median(row[name] for row in rows) for name in names]
        print(f"{overlap:<10}" + "".join(f"{value:16.3f}" for value in middle))
    for clock in ("wall_s", "cpu_s"):
        ratios = sorted(plain[clock] / ahead[clock] for plain, ahead in zip(found[0], found[1], strict=True))
        print(
            f"{arguments.dtype}, {clock}: overlap 0 / overlap 1 = {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs)"
        )
    print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f} with {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="counted steps per repetition")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--model", type=Path, help="a model directory; default: a warm-started builtin:tiny")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(one(arguments.model, arguments.dtype, arguments.steps, arguments.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, arguments.model or prepare(Path(folder)))


if __name__ == "__main__":
    main()
