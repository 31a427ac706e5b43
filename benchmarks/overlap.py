"""A step with `[rollout] overlap` 0 and 1 on two cores, from the same warm-started weights.

The systems take turns, each in a fresh process; a ratio pairs the medians of one repetition. Without overlap there is
one thread, or two for every matrix product: what else a second core could do. With overlap trainer and sampler
have a thread each. Two settings: the default, where sampling takes a third to a half of the training's time, and one
where it takes about as long, because a prompt whose completions are all right or all wrong is replaced by another.
The load of the machine is printed beside the figures: each of the two threads needs a core of its own.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from step import SETTLING, Retrain, Stopwatch, prepare

PHASES = ("time/step_s", "time/rollout_s", "time/wait_s", "time/credit_s", "time/update_s", "time/sync_s")
TOKENS = "tokens/sampled"
MISMATCH = ("mismatch/kl", "mismatch/logp_diff_mean", "rollout/staleness")
SETTINGS = {
    "default": ("", ""),
    "dynamic": (
        'algorithm = { filter = "accuracy_band" }\naccuracy_band = { low = 0.25, high = 0.75 }',
        'resample = "uninformative", max_resample = 2',
    ),
}


class System(NamedTuple):
    """A way to use two cores: threads of the process, and steps that sampling is ahead."""

    threads: int
    overlap: int


SYSTEMS = {"one thread": System(1, 0), "two threads": System(2, 0), "overlap": System(1, 1)}


def one(model: Path, dtype: str, steps: int, system: System, setting: str) -> list[dict[str, float]]:
    """Seconds of every step of a run, by phase, and how stale its batch is."""
    from retrain.config.load import load
    from retrain.run.session import Resume, run

    stopwatch = Stopwatch()

    def observe(event: str, details: Any) -> None:
        if event == "step":
            stopwatch.lap(**{name: details.get(name, 0.0) for name in (*PHASES, *MISMATCH, TOKENS)})

    tables, rollout = SETTINGS[setting]
    rollout = ", ".join(filter(None, (f"overlap = {system.overlap}", rollout)))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "bench.toml"
        text = Retrain().toml(model, dtype, steps, folder, system.threads)
        config.write_text(f"{tables}\nrollout = {{ {rollout} }}\n{text}")
        run(load(config), Resume(), observe)
    return stopwatch.rows


def measure(arguments: argparse.Namespace, model: Path, name: str, setting: str) -> dict[str, float]:
    """Medians of one repetition in its own process, without the first steps and the last, which samples nothing."""
    command = [sys.executable, __file__, "--one", name, "--settings", setting, "--dtype", arguments.dtype]
    threads = str(SYSTEMS[name].threads)
    done = subprocess.run(
        [*command, "--model", str(model), "--steps", str(arguments.steps + SETTLING + 1)],
        env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name}, {setting} failed:\n{done.stderr[-3000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])[SETTLING:-1]
    return {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}


def compare(arguments: argparse.Namespace, model: Path, setting: str) -> None:
    """Take turns, and print the phases and the ratios."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    loads: list[float] = []
    for repetition in range(arguments.repetitions):
        for name in SYSTEMS if repetition % 2 == 0 else reversed(SYSTEMS):
            found[name].append(measure(arguments, model, name, setting))
            loads.append(os.getloadavg()[0])
            text = {phase: round(value, 3) for phase, value in found[name][-1].items()}
            print(f"{setting}, {name}", text, f"load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    names = list(found["overlap"][0])
    print(f"{setting:14}" + "".join(f"{name.rpartition('/')[2]:>15}" for name in names))
    for name, rows in found.items():
        middle = [statistics.median(row[phase] for row in rows) for phase in names]
        print(f"{name:14}" + "".join(f"{value:15.4g}" for value in middle))
    for name in ("one thread", "two threads"):
        for clock in ("wall_s", "cpu_s"):
            print(ratio(f"{setting}, {arguments.dtype}, {clock}", name, found[name], found["overlap"], clock))
    print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f} with {os.cpu_count()} cores\n")


def ratio(
    what: str, name: str, plain: Sequence[dict[str, float]], ahead: Sequence[dict[str, float]], clock: str
) -> str:
    """The median of the ratios of pairs, with the least and the greatest, in words."""
    pairs = list(zip(plain, ahead, strict=True))
    ratios = sorted(a[clock] / b[clock] for a, b in pairs)
    by_token = statistics.median(a[clock] * b[TOKENS] / (b[clock] * a[TOKENS]) for a, b in pairs)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs"
    return f"{what}: {name} / overlap = {statistics.median(ratios):.2f} ({spread}); per sampled token {by_token:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="counted steps per repetition")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--model", type=Path, help="a model directory; default: a warm-started builtin:tiny")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        rows = one(arguments.model, arguments.dtype, arguments.steps, SYSTEMS[arguments.one], *arguments.settings)
        print(json.dumps(rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or prepare(Path(folder))
        for setting in arguments.settings:
            compare(arguments, model, setting)


if __name__ == "__main__":
    main()
