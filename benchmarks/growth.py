"""How costs grow: of an update with rows, tokens, vocabulary and depth; of data with rows; of reports with runs.

A figure is CPU seconds of one core, or megabytes; the exponent is the slope between the smallest and the largest size
on logarithmic scales: 1 is linear. Everything is synthetic but one short run, whose rows are repeated.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--repetitions 3] [--only rows data ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.algorithms.graph.objective import Objective
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from retrain.types import Batch

SHAPE = {"rows": 32, "tokens": 64, "vocabulary": 128, "depth": 2}
SIZES: dict[str, Sequence[int]] = {
    "rows": (16, 64, 256),
    "tokens": (64, 256, 1024, 4096),
    "vocabulary": (128, 4_096, 32_768, 151_936),
    "depth": (2, 8, 32),
    "data": (10_000, 100_000, 1_000_000),
    "steps": (100, 1_000, 10_000),
    "runs": (10, 100, 1_000),
}
WHAT = {
    "rows": "update, rows of 64 tokens",
    "tokens": "update, tokens of each of 2 rows",
    "vocabulary": "update, tokens of the vocabulary",
    "depth": "update, layers",
    "data": "rows of a jsonl file read",
    "steps": "report of a run, steps",
    "runs": "report of a campaign, runs",
}
READ = """
import sys
from pathlib import Path
from retrain.data.rows import Jsonl

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak()
Jsonl(0, path=sys.argv[1])
print(peak() - before)
"""
RETRAIN = [sys.executable, "-m", "retrain"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=[*SIZES], default=[*SIZES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            measure = {"data": data, "steps": steps, "runs": runs}.get(name)
            costs: list[float] = []
            for size in SIZES[name]:
                call = measure(Path(folder), size) if measure else update(**{name: size})
                repeated = [call() for _ in range(options.repetitions)]
                costs.append(statistics.median(cost for cost, _ in repeated))
                more = f"{statistics.median(memory for _, memory in repeated):8.0f} MB" if repeated[0][1] else ""
                print(f"{WHAT[name]:<36}{size:>10,}{costs[-1]:>10.3f} s{more}", flush=True)
            slope = math.log(costs[-1] / costs[0]) / math.log(SIZES[name][-1] / SIZES[name][0])
            print(f"{WHAT[name]:<36}{'exponent':>10}{slope:>10.2f}", flush=True)


def update(**changes: int) -> Callable[[], tuple[float, float]]:
    """An update of a model of width 64."""
    shape = SHAPE | changes | ({"rows": 2} if "tokens" in changes else {})
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocabulary"],
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=shape["depth"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    policy = TorchPolicy(Qwen3ForCausalLM(config), PolicySettings(lr=1e-5))
    objective = Objective([find("loss", "ppo_clip").bind({})], find("reduction", "token_mean").bind({}))
    full = torch.ones(shape["rows"], shape["tokens"], dtype=torch.bool)
    scored = full & (torch.arange(shape["tokens"]) >= 8)
    values = torch.randn(full.shape)
    batch = Batch(
        input_ids=torch.randint(0, shape["vocabulary"], full.shape),
        attention_mask=full,
        response_mask=scored,
        sampler_logprobs=-values.abs().where(scored, 0.0),
        rewards=torch.ones(len(full)),
        correct=full[:, 0],
        lengths=scored.sum(-1),
        group_ids=torch.arange(len(full)),
        is_expert=~full[:, 0],
        advantages=values.where(scored, 0.0),
    )
    policy.update(batch, objective)

    def call() -> tuple[float, float]:
        began = time.process_time()
        policy.update(batch, objective)
        return time.process_time() - began, 0.0

    return call


def data(folder: Path, size: int) -> Callable[[], tuple[float, float]]:
    """Reading a file of short problems, in a process that does nothing else."""
    file = folder / "problems.jsonl"
    with file.open("w") as lines:
        for number in range(size):
            row = {
                "prompt": f"Problem {number}: what is {number % 997} + {number % 1009}?",
                "answer": f"{number % 997}",
            }
            lines.write(json.dumps(row) + "\n")
    return lambda: timed([sys.executable, "-c", READ, str(file)], folder, memory=True)


def steps(folder: Path, size: int) -> Callable[[], tuple[float, float]]:
    """The report of a run so long."""
    run = folder / "long"
    shutil.copytree(trained(folder), run, dirs_exist_ok=True)
    repeat(trained(folder), run, size)
    return lambda: timed([*RETRAIN, "report", str(run)], folder)


def runs(folder: Path, size: int) -> Callable[[], tuple[float, float]]:
    """The report of a campaign of five conditions, each run with a hundred steps."""
    sweep = folder / f"sweep{size}.toml"
    lines = ["[campaign]", f"seeds = {size // 5}"]
    for place in range(5):
        lines += ["[[campaign.conditions]]", f'label = "c{place}"', f"training.temperature = {1 - place / 10}"]
    sweep.write_text("\n".join(lines) + "\n")
    timed([*RETRAIN, "campaign", str(sweep), "--slurm"], folder)
    source, outcome = trained(folder), {"status": "done", "exit_code": 0, "attempts": 1, "seconds": 1.0}
    for number, cell in enumerate(sorted((folder / "runs" / sweep.stem / "cells").glob("*/*"))):
        for name in ("config.resolved.json", "environment.json", "status.json"):
            shutil.copy(source / name, cell)
        repeat(source, cell, 100, shift=number % 7 / 100)
        (cell / "outcome.json").write_text(json.dumps(outcome | {"reason": "", "host": "here"}))
    return lambda: timed([*RETRAIN, "report", f"runs/{sweep.stem}"], folder)


def trained(folder: Path) -> Path:
    """One short run."""
    run = folder / "runs" / "short"
    if not run.exists():
        (folder / "short.toml").write_text("[training]\nmax_steps = 2\n[warmup]\nsteps = 2\n")
        timed([*RETRAIN, "train", "short.toml", "--plain", "--set", "logging.name=short"], folder)
    return run


def repeat(source: Path, run: Path, size: int, shift: float = 0.0) -> None:
    """Write the metrics of as many steps, and fifty evaluations at most, with the short run's values."""
    last: dict[str, dict[str, Any]] = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        last[name] = json.loads((source / name).read_text().splitlines()[-1])
    last["eval.jsonl"]["accuracy"] += shift
    for name, every in (("metrics.jsonl", 1), ("eval.jsonl", max(1, size // 50))):
        rows = (json.dumps(last[name] | {"step": step}) + "\n" for step in range(0, size, every))
        (run / name).write_text("".join(rows))


def timed(command: list[str], folder: Path, memory: bool = False) -> tuple[float, float]:
    """CPU seconds of a command, and the megabytes that it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, int(done.stdout) / 1000 if memory else 0.0


if __name__ == "__main__":
    main()
