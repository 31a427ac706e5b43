"""Measure what a second model adds to a step: a teacher's log-probs, or a critic's values and its updates.

The systems take turns, each in a fresh process, from the same weights. What one adds is in the phase that computes
credit, which takes GRPO next to nothing; a ratio pairs two phases of one repetition. The unit is a forward pass of the
policy over the same rows, which the transform `otb` needs and GRPO does not. A teacher of the policy's size should add
one of them; a critic one, and an update per epoch.

    python benchmarks/second_models.py --steps 4 --repetitions 5 [--shape 20M]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from shapes import SHAPES
from step import SETTLING, Retrain, prepare, train_apart

PHASES = ("time/credit_s", "time/update_s", "time/step_s")
SYSTEMS = {
    "grpo": "",
    "forward": 'algorithm = { transform_mode = ["otb"] }',
    "teacher": 'algorithm = { transform_mode = ["opd"] }\nopd = { outcome = 1.0 }\nteacher = { model = "MODEL" }',
    "critic": 'algorithm = { transform_mode = ["gae", "whiten"] }\ncritic = { epochs = 1, warmup_steps = 0 }',
}


def measure(arguments: argparse.Namespace, model: Path, name: str) -> list[float]:
    """Medians of one run over its counted steps: seconds of each of PHASES."""
    with tempfile.TemporaryDirectory() as folder:
        text = Retrain().toml(model, arguments.dtype, arguments.steps + SETTLING, folder, 1, SHAPES[arguments.shape])
        text = SYSTEMS[name].replace("MODEL", str(model.resolve())) + text
        rows = train_apart(folder, text, name)[SETTLING:]
    return [statistics.median(row[phase] for row in rows) for phase in PHASES]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="counted steps per repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--shape", choices=SHAPES, default="20M")
    arguments = parser.parse_args()
    make = prepare if arguments.shape == "1.4M" else SHAPES[arguments.shape].save
    found: dict[str, list[list[float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder))
        for repetition in range(arguments.repetitions):
            for name in SYSTEMS if repetition % 2 == 0 else reversed(SYSTEMS):
                found[name].append(measure(arguments, model, name))
                print(name, *(f"{value:.3f}" for value in found[name][-1]), file=sys.stderr, flush=True)
    print(f"{arguments.shape}, {arguments.dtype}: seconds of a step, medians of {arguments.repetitions} repetitions")
    print(f"{'':9}" + "".join(f"{phase[5:-2]:>9}" for phase in PHASES))
    for name, rows in found.items():
        print(f"{name:9}" + "".join(f"{statistics.median(column):9.3f}" for column in zip(*rows, strict=True)))
    repetitions = [dict(zip(found, rows, strict=True)) for rows in zip(*found.values(), strict=True)]
    teacher = [one["teacher"][0] / one["forward"][0] for one in repetitions]
    critic = [one["critic"][0] / (one["forward"][0] + one["grpo"][1]) for one in repetitions]
    print(f"a teacher takes {spread(teacher)} times a forward pass of the policy")
    print(f"a critic takes {spread(critic)} times a forward pass and an update of the policy")


if __name__ == "__main__":
    main()
