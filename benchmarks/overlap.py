"""What a second core is worth: a step with one thread, with two, with `[rollout] overlap = 1`, and on two ranks.

The systems take turns, each in a fresh process, from the same weights; a ratio pairs the medians of one repetition.
With overlap trainer and sampler have a thread each, and ranks have one thread each. Two settings: the default, where
sampling takes a third to a half of the training's time, and at the smallest shape one where it takes about as long,
because a prompt whose completions are all right or all wrong is replaced by another. The load of the machine is printed
beside the figures: each of two threads needs a core of its own.

    python benchmarks/overlap.py --steps 12 --repetitions 6 [--shape 20M --settings default]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shapes import SHAPES
from step import SETTLING, Retrain, prepare, train_apart

STEP = "time/step_s"
PHASES = (STEP, "time/rollout_s", "time/wait_s", "time/credit_s", "time/update_s", "time/sync_s")
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
    """A way to use two cores: threads of each process, steps that sampling is ahead, and processes."""

    threads: int
    overlap: int = 0
    ranks: int = 1


SYSTEMS = {"one thread": System(1), "two threads": System(2), "overlap": System(1, 1), "two ranks": System(1, 0, 2)}


def measure(arguments: argparse.Namespace, model: Path, name: str, setting: str) -> dict[str, float]:
    """Medians of one run, without the first steps and the last, which samples nothing."""
    system, (tables, rollout) = SYSTEMS[name], SETTINGS[setting]
    rollout = ", ".join(filter(None, (f"overlap = {system.overlap}", rollout)))
    with tempfile.TemporaryDirectory() as folder:
        steps = arguments.steps + SETTLING + 1
        text = Retrain().toml(model, arguments.dtype, steps, folder, system.threads, SHAPES[arguments.shape])
        flags = ["--ranks", str(system.ranks)] if system.ranks > 1 else []
        text = f"{tables}\nrollout = {{ {rollout} }}\n{text}"
        rows = train_apart(folder, text, f"{name}, {setting}", *flags)[SETTLING:-1]
    return {phase: statistics.median(row.get(phase, 0.0) for row in rows) for phase in (*PHASES, *MISMATCH, TOKENS)}


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
    for name in ("two threads", "overlap", "two ranks"):
        print(ratio(f"{arguments.shape}, {setting}, {arguments.dtype}", name, found["one thread"], found[name]))
    print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f} with {os.cpu_count()} cores\n")


def ratio(what: str, name: str, plain: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> str:
    """The median of the ratios of pairs, with the least and the greatest, in words."""
    pairs = list(zip(plain, other, strict=True))
    ratios = sorted(a[STEP] / b[STEP] for a, b in pairs)
    by_token = statistics.median(a[STEP] * b[TOKENS] / (b[STEP] * a[TOKENS]) for a, b in pairs)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs"
    return f"{what}: one thread / {name} = {statistics.median(ratios):.2f} ({spread}); per sampled token {by_token:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="counted steps per repetition")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--model", type=Path, help="a model directory; default: a warm-started builtin:tiny")
    parser.add_argument("--shape", choices=SHAPES, default="1.4M")
    arguments = parser.parse_args()
    make = prepare if arguments.shape == "1.4M" else SHAPES[arguments.shape].save
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make(Path(folder))
        for setting in arguments.settings:
            compare(arguments, model, setting)


if __name__ == "__main__":
    main()
