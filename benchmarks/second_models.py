"""What a second model adds to a step: a teacher's log-probs, or a critic's values and its updates.

The systems take turns, each in a fresh process, from the same weights; what one adds is its step less that of GRPO in
the same repetition. The unit is a forward pass of the policy over the same rows, which the transform `otb` needs and
GRPO does not. A teacher of the policy's size should add one of them; a critic one, and an update per epoch.

    python benchmarks/second_models.py --steps 4 --repetitions 5 [--shape 20M]
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

from shapes import SHAPES
from step import SETTLING, Retrain, prepare

STEP, UPDATE = "time/step_s", "time/update_s"
SAMPLED = "time/rollout_s"
SYSTEMS = {
    "grpo": "",
    "forward": 'algorithm = { transform_mode = ["otb"] }',
    "teacher": 'algorithm = { transform_mode = ["opd"] }\nopd = { outcome = 1.0 }\nteacher = { model = "MODEL" }',
    "critic": 'algorithm = { transform_mode = ["gae", "whiten"] }\ncritic = { epochs = 1, warmup_steps = 0 }',
}


def measure(arguments: argparse.Namespace, model: Path, name: str) -> tuple[float, float]:
    """Medians of one run over its counted steps: seconds of a step without its sampling, and of its update."""
    with tempfile.TemporaryDirectory() as folder:
        config, steps = Path(folder) / "bench.toml", arguments.steps + SETTLING
        text = Retrain().toml(model, arguments.dtype, steps, folder, 1, SHAPES[arguments.shape])
        config.write_text(SYSTEMS[name].replace("MODEL", str(model.resolve())) + text)
        command = [sys.executable, "-m", "retrain", "train", str(config), "--plain", "--set", "logging.name=one"]
        variables = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        lines = (Path(folder) / "one" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][SETTLING:]
    return statistics.median(row[STEP] - row[SAMPLED] for row in rows), statistics.median(row[UPDATE] for row in rows)


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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder))
        for repetition in range(arguments.repetitions):
            for name in SYSTEMS if repetition % 2 == 0 else reversed(SYSTEMS):
                found[name].append(measure(arguments, model, name))
                print(name, *(f"{value:.3f}" for value in found[name][-1]), file=sys.stderr, flush=True)
    plain = [step for step, _ in found["grpo"]]
    print(f"{arguments.shape}, {arguments.dtype}: seconds of a step without sampling, median of {len(plain)}")
    for name, rows in found.items():
        added = [step - base for (step, _), base in zip(rows, plain, strict=True)]
        print(f"{name:9}{statistics.median(step for step, _ in rows):8.2f}  adds {spread(added)}")
    unit = statistics.median(step - base for (step, _), base in zip(found["forward"], plain, strict=True))
    update = statistics.median(update for _, update in found["grpo"])
    for name, cost in (("teacher", unit), ("critic", unit + update)):
        shares = [(step - base) / cost for (step, _), base in zip(found[name], plain, strict=True)]
        print(f"{name} adds {spread(shares)} times {'a forward pass' + ' and an update' * (name == 'critic')}")


if __name__ == "__main__":
    main()
