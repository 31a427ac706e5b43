"""A real model on a GPU, for `gpu_check.py`: `configs/smollm2.toml` with its curve, and a step against TRL's.

The run is the shipped recipe with 50 steps, as `retrain train` runs it; in rehearsal, two steps of the quickstart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.storage.run_files import read_rows
from retrain.system.model_paths import SMOLLM2
from retrain.training.memory import ModelShape

ROOT = Path(__file__).parents[1]
STEPS = 50
REHEARSAL = ["training.max_steps=2", "warmup.steps=2", "eval.problems=4", "eval.every=1"]


def recipe(place: torch.device, rate: float) -> str:
    """The curve, tokens per second and share of the matrix rate (FLOP/s) of a run of SmolLM2's recipe."""
    if place.type == "cuda" and not SMOLLM2.is_here:
        return "SmolLM2: NOT MEASURED, `retrain model fetch smollm2` first, or carry its cache here ($RETRAIN_CACHE)"
    if place.type == "cuda":
        lines = [engine_run("torch", rate)]
        lines.append(engine_run("vllm", rate) if find_spec("vllm") else "SmolLM2, vllm: NOT MEASURED, not installed")
        return "\n".join(lines)
    return one_run("quickstart, rehearsal", "configs/quickstart.toml", REHEARSAL, rate)


def engine_run(engine: str, rate: float) -> str:
    """The recipe with this engine, evaluated every ten steps."""
    settings = [f"training.max_steps={STEPS}", "eval.every=10", f'rollout.engine="{engine}"', 'training.device="cuda"']
    return one_run(f"SmolLM2, {engine}", "configs/smollm2.toml", settings, rate)


def one_run(title: str, config: str, settings: list[str], rate: float) -> str:
    """Train, and say how accuracy rose and what a step cost (medians without the first step)."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(ROOT)  # the recipe names its data from the directory that it is run in
        try:
            chosen = [*settings, f'logging.dir="{folder}"', 'logging.name="run"', "eval.greedy=false"]
            out = run(load(Path(config), chosen), Resume("fresh"), lambda event, details: None)
        finally:
            os.chdir(before)
        steps, curve = read_rows(out / "metrics.jsonl"), read_rows(out / "eval.jsonl")
        model = ModelShape.of(json.loads((out / "model" / "config.json").read_text(encoding="utf-8")))
    points = ", ".join(f"{row['step']}: {row['accuracy']:.1%}" for row in curve)
    seconds = statistics.median(row["time/step_s"] for row in steps[1:])
    tokens = statistics.median(row["tokens/sampled"] for row in steps[1:])
    # Two operations per weight and sampled token, six per trained one; live groups alone are trained.
    work = statistics.median(
        model.parameters * row["tokens/sampled"] * (2 + 6 * row.get("groups/informative", 1.0)) for row in steps[1:]
    )
    return (
        f"{title}: held-out accuracy by step {points}; a step takes {seconds:.2f} s, {tokens / seconds:,.0f} sampled "
        f"tokens/s, {work / seconds / rate:.2%} of the matrix rate"
    )


def against_trl(place: torch.device) -> str:
    """Compare a step of the recipe with one of TRL's, by `real.py`."""
    if not SMOLLM2.is_here:
        return "SmolLM2 against TRL: NOT MEASURED, the model is not here"
    steps = "4" if place.type == "cuda" else "1"
    return compared_with_trl("SmolLM2 against TRL", "real.py", place, ["--steps", steps])


def compared_with_trl(title: str, script: str, place: torch.device, options: list[str]) -> str:
    """Run one repetition of a benchmark against TRL, if that is installed; return its output, or why there is none."""
    missing = [name for name in ("trl", "datasets") if not find_spec(name)]
    if missing:
        return f"{title}: NOT MEASURED, {' and '.join(missing)} not installed"
    command = [sys.executable, str(Path(__file__).with_name(script)), "--repetitions", "1", "--device", place.type]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    return f"{title}:\n{done.stdout if done.returncode == 0 else 'FAILED ' + done.stderr[-2000:]}"
