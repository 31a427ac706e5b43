"""Campaign directories with known differences, written as the runner writes them."""

import copy
import gzip
import json
import math
import random
import tempfile
from pathlib import Path

from retrain.config.load import load

TOML = """
[model]
path = "builtin:tiny"

[training]
max_steps = 200
batch_size = 16
group_size = 8
max_tokens = 64
lr = 2e-4

[eval]
every = 20
problems = 512
"""

CONDITIONS = {
    "grpo": {"algorithm.advantage_mode": "grpo"},
    "maxrl": {"algorithm.advantage_mode": "maxrl"},
    "maxrl+gtpo": {"algorithm.advantage_mode": "maxrl", "algorithm.transform_mode": "gtpo"},
    "maxrl+gtpo+hicra": {"algorithm.advantage_mode": "maxrl", "algorithm.transform_mode": "gtpo_hicra"},
    "maxrl+gtpo+sepa": {"algorithm.advantage_mode": "maxrl", "algorithm.transform_mode": "gtpo_sepa"},
}
EFFECTS = {"grpo": 0.0, "maxrl": 0.09, "maxrl+gtpo": 0.10, "maxrl+gtpo+hicra": 0.145, "maxrl+gtpo+sepa": 0.11}
ENVIRONMENT = {
    "python": "3.11.7",
    "platform": "Linux",
    "packages": {"retrain": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0"},
    "cpu": "Example 3000",
    "cpus": 8,
    "threads": 1,
    "devices": [],
    "variables": {"OMP_NUM_THREADS": "1"},
    "git": "0123abc",
}


def overrides(condition: str, seed: int) -> list[str]:
    changes = CONDITIONS.get(condition, {})
    return [*(f"{key}={json.dumps(value)}" for key, value in changes.items()), f"training.seed={seed}"]


def write_campaign(
    directory: Path,
    *,
    conditions=tuple(CONDITIONS),
    effects=EFFECTS,
    seeds=range(10),
    steps=200,
    every=20,
    failed=(("maxrl", 3),),
    missing=(("maxrl+gtpo+sepa", 9),),
    unfinished=(),
    noise=0.012,
    **plan,
) -> Path:
    """Write a campaign: final accuracy = .40 + effect + seed's share (sd .03) + noise; returns the directory."""
    cells = []
    for seed in seeds:
        shared = random.Random(f"seed {seed}").gauss(0, 0.03)
        for condition in conditions:
            path = f"cells/{condition}/s{seed}"
            cell = {"id": f"{condition}/s{seed}", "condition": condition, "seed": seed, "path": path}
            written = dict(text.split("=", 1) for text in overrides(condition, seed))
            cells.append(cell | {"overrides": written, "max_steps": steps})
            if (condition, seed) in missing:
                continue
            rng = random.Random(f"{condition} {seed}")
            final = 0.40 + effects[condition] + shared + rng.gauss(0, noise)
            ends = _end(condition, seed, failed, unfinished)
            length = steps if ends == "done" else steps // 3
            write_cell(directory / path, condition, seed, final, rng, range(0, length + 1, every), steps)
            if ends != "unfinished":
                outcome = {"status": ends, "exit_code": 0 if ends == "done" else 4, "attempts": 1, "seconds": 31.5}
                outcome |= {"reason": "" if ends == "done" else "the loss was not finite in 5 steps", "host": "node1"}
                (directory / path / "outcome.json").write_text(json.dumps(outcome))
    (directory / "campaign.toml").write_text(TOML)
    ladder = list(zip(conditions[1:], conditions, strict=False))
    stored = {"baseline": conditions[0], "ladder": ladder, "alpha": 0.05, "cells": cells} | plan
    (directory / "plan.json").write_text(json.dumps(stored))
    return directory


def _end(condition, seed, failed, unfinished):
    if (condition, seed) in failed:
        return "failed"
    return "unfinished" if (condition, seed) in unfinished else "done"


def write_cell(
    path: Path, condition: str, seed: int, final: float, rng: random.Random, evaluated: range, steps: int = 200
) -> None:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(TOML)
    resolved = resolve(condition)
    resolved["training"] |= {"seed": seed, "max_steps": steps}
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (path / "status.json").write_text(json.dumps({"outcome": "running"}))
    rows, last = [], evaluated[-1]
    for step in range(last):
        row = {"step": step, "reward/mean": 0.3, "rollout/completions": 128.0, "tokens/sampled": 2400.0 + seed * 8}
        rows.append(row | {"time/step_s": 0.15 + 0.01 * rng.random(), "sepa/lambda": min(step / 100, 1.0)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evals = [evaluation(step, final, rng) for step in evaluated]
    evals[-1]["accuracy"] = final
    (path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    (path / "rollouts").mkdir()
    for step in (0, last // 2):
        lines = "".join(json.dumps(row) + "\n" for row in group(rng))
        (path / "rollouts" / f"step-{step:06d}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def resolve(condition: str) -> dict:
    """The resolved configuration of a condition."""
    if condition not in _RESOLVED:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(TOML)
            file.flush()
            _RESOLVED[condition] = load(file.name, overrides(condition, 0)).resolved()
    return copy.deepcopy(_RESOLVED[condition])


_RESOLVED: dict[str, dict] = {}


def evaluation(step: int, final: float, rng: random.Random) -> dict:
    accuracy = 0.12 + (final - 0.12) * (1 - math.exp(-step / 50)) + rng.gauss(0, 0.008)
    return {"step": step, "accuracy": accuracy, "ci_low": accuracy - 0.04, "ci_high": accuracy + 0.04} | {
        "avg_tokens": 20 + 10 * accuracy + rng.random(),
        "problems": 512,
    }


SOLUTIONS = (
    ("let me think\n5+8=13\n8+9+1=18\n4+1+1=6\nso 683", 1.0),
    ("let me think\n5+8=13\n8+9+1=17\n4+1+1=6\nso 673", 0.0),
    ("5+8=13\nwait, let me check\n8+9+1=18\nso 683", 1.0),
    ("so 680", 0.0),
)


def group(rng: random.Random, *, prompt: str = "485+198?\n") -> list[dict]:
    """A group of stored rollouts, two right and two wrong, one token per word or sign."""
    rows = []
    for text, reward in SOLUTIONS:
        tokens = [*_split(text), "<eos>"]
        plan = text.split("\n")[0] if "think" in text else ""
        rows.append(
            {
                "problem_id": "485+198",
                "prompt": prompt,
                "answer": "683",
                "prompt_ids": [5, 6, 7],
                "completion_ids": list(range(3, 3 + len(tokens))),
                "sampler_logprobs": [-rng.expovariate(2.0) for _ in tokens],
                "text": text,
                "turns": [{"start": 0, "end": len(tokens), "finish_reason": "stop", "weights_version": 0}],
                "group": 0,
                "greedy": 0.25,
                "reward": reward,
                "correct": reward > 0.5,
                "status": "ok",
                "tokens": tokens,
                "advantages": [reward - 0.5] * len(tokens),
                "planning": [int(bool(plan) and index < len(_split(plan))) for index in range(len(tokens))],
            }
        )
    return rows


def _split(text: str) -> list[str]:
    """`let`, ` me`, ` think`, newline, `5`, `+`, ..."""
    tokens: list[str] = []
    for character in text:
        joins = character.isalpha() and tokens and (tokens[-1][-1:].isalpha() or tokens[-1] == " ")
        if joins:
            tokens[-1] += character
        else:
            tokens.append(character)
    return tokens
