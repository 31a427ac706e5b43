"""Seconds of a step by how OpenMP threads wait for each other, on a quiet machine and beside busy processes.

    python benchmarks/waiting.py configs/smollm2.toml                     five runs of each setting, alternating
    python benchmarks/waiting.py configs/quickstart.toml --steps 12 --busy 0 2 --repetitions 3

`sleep` is OMP_WAIT_POLICY=passive, a number adds GOMP_SPINCOUNT, and `auto` is what `retrain train` chooses by itself.
Shows medians over the runs, and over the steps of a run from the third on: a step, sampling, update.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
TIMES = ("time/step_s", "time/rollout_s", "time/update_s")
QUICK = ("eval.every=0", "eval.problems=8", "checkpoint.every=0", "logging.rollouts_every=0")


def run(config: str, setting: str, steps: int) -> list[float]:
    """Train in a new process; the median of each of TIMES."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if setting != "auto":
        environment["OMP_WAIT_POLICY"] = "passive"
    if setting.isdecimal():
        environment["GOMP_SPINCOUNT"] = setting
    with tempfile.TemporaryDirectory() as folder:
        keys = (*QUICK, f"training.max_steps={steps}", f'logging.dir="{folder}"', "logging.name=run")
        options = [word for key in keys for word in ("--set", key)]
        command = [sys.executable, "-m", "retrain", "train", config, "--plain", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{setting} failed:\n{done.stderr[-3000:]}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()][2:]
    return [median(row[name] for row in rows) for name in TIMES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--settings", nargs="+", default=["sleep", "auto"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2], help="processes that compute beside the run")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.config}: median seconds of a step (range over runs), of sampling, of the update")
    for count in options.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        found: dict[str, list[list[float]]] = {setting: [] for setting in options.settings}
        try:
            for _ in range(options.repetitions):
                for setting in options.settings:
                    found[setting].append(times := run(options.config, setting, options.steps))
                    print(f"  {setting:8}{''.join(f'{seconds:7.2f}' for seconds in times)}", flush=True)
        finally:
            for process in others:
                process.kill()
        for setting, runs in found.items():
            step, rollout, update = zip(*runs, strict=True)
            spread = f"({min(step):.2f} to {max(step):.2f})"
            line = f"{median(step):7.2f} {spread:18} {median(rollout):6.2f} {median(update):6.2f}"
            print(f"beside {count} busy processes  {setting:8}{line}", flush=True)


if __name__ == "__main__":
    main()
