"""Updates that one process and several ranks must agree on; `python -m` this file is a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retrain.config.load import load
from retrain.errors import RetrainError
from retrain.run.session import Resume, run
from retrain.storage.run_directory import Mode
from retrain.training.policy import TorchPolicy
from retrain.training.prm import ProcessRewards
from retrain.training.ranks import Ranks, join
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.training.shards import full
from tests.training.small_models import make_batch, make_model, make_objective

TABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "epochs x minibatches": {"settings": {"epochs": 2, "minibatches": 2}},
    "uneven rows": {"batch": {"rows": 12, "longest": 50, "dead": 5}},
    "fewer live rows than ranks": {"batch": {"rows": 8, "dead": 7}, "terms": ["ppo_clip"]},
    "no live row": {"batch": {"rows": 8, "dead": 8}, "terms": ["ppo_clip"]},
    "many micro-batches": {"settings": {"micro_batch_tokens": 20}, "batch": {"rows": 16}},
    "checkpointing": {"settings": {"gradient_checkpointing": True}},
    "chunked head": {"settings": {"logprob_chunk": 3}},
    "chunked head and checkpointing": {"settings": {"gradient_checkpointing": True, "logprob_chunk": 3}},
    "muon": {"settings": {"optimizer": "muon", "lr": 1e-4}},
    "clipped": {"settings": {"max_grad_norm": 1e-2}},
    "bf16": {"settings": {"dtype": "bfloat16"}},
    "bf16 LoRA": {"settings": {"dtype": "bfloat16", "lora": {"r": 4}}},
    "LoRA": {"settings": {"lora": {"r": 4, "seed": 3}}},
    "LoRA on replicas": {"settings": {"lora": {"r": 4, "seed": 3}, "shard": "none"}},
    "replicas": {"settings": {"shard": "none"}},
    "untied, padded": {"model": "windowed"},
    "no split head": {"model": "capped"},
    "gpt2": {"model": "gpt2"},
    "prime": {"prime": {"lr": 1e-3}},
    "prime, policy reference": {"prime": {"lr": 1e-3, "reference": "policy"}},
    "prime LoRA": {"prime": {"lr": 1e-3}, "settings": {"lora": {"r": 4, "seed": 3}}},
}
STEPS = 3


def policy_of(case: dict[str, Any], ranks: Ranks) -> TorchPolicy:
    # AdamW divides by sqrt(v) + eps: with a small eps rounding moves a weight without gradient by lr.
    changes = {"lr": 1e-3, "eps": 1e-4, **case.get("settings", {})}
    if "lora" in changes:
        changes["lora"] = LoraSettings(**changes["lora"])
    return TorchPolicy(make_model(case.get("model", "qwen3")), PolicySettings(**changes), ranks)


def watch(policy: TorchPolicy, caught: list[dict[str, torch.Tensor]]) -> None:
    """Keep the whole gradients that the optimizer applies."""
    apply = policy.optimizer.step

    def step(number: int) -> float:
        caught.append({name: full(p.grad).clone() for name, p in policy.optimizer.parameters.items()})
        return apply(number)

    policy.optimizer.step = step


def train(ranks: Ranks, name: str) -> dict[str, Any]:
    """Three updates with scoring before each; returns gradients, weights, tables and metrics."""
    case = TABLE[name]
    policy, gradients, metrics, tables = policy_of(case, ranks), [], [], []
    prm = ProcessRewards(policy, None, **case["prime"]) if "prime" in case else None
    watch(policy, gradients)
    for step in range(STEPS):
        batch = make_batch(seed=step, **case.get("batch", {}))
        batch = batch.replace(correct=torch.arange(len(batch.correct)) % 3 == 0)
        tables.append(policy.logprobs(batch, ("old_logprobs", "entropy", "varentropy")))
        reported = {}
        if prm is not None:
            columns = (batch.input_ids, batch.attention_mask, batch.response_mask, batch.sampler_logprobs)
            batch = batch.replace(process_rewards=prm(*columns))
            tables.append({"process_rewards": batch.column("process_rewards")})
            reported = prm.after(batch)
        policy.remember()
        reported |= policy.update(batch, make_objective(*case.get("terms", ("ppo_clip", "entropy"))))
        tables.append({"earlier": policy.earlier_logprobs(batch)})
        metrics.append(reported)
    weights = {"policy": policy, **({"prm": prm.model} if prm else {})}
    found = {
        f"{key}.{name}": value.clone() for key, one in weights.items() for name, value in dict(one.weights()).items()
    }
    packed = {"packed": float(policy.forward.packed_limit > 0), "splits": float(policy.forward.splits)}
    return {"gradients": gradients, "weights": found, "metrics": [packed, *metrics], "tables": tables}


def resumed(ranks: Ranks, name: str, file: str) -> dict[str, Any]:
    """Whole state after one update, written by rank 0 (or read, if it is there), then one more update."""
    policy = policy_of(TABLE[name], ranks)
    path = Path(file)
    if path.exists():
        policy.load_state_dict(torch.load(path))
    else:
        policy.update(make_batch(), make_objective())
        state = _whole(policy.state_dict())
        if ranks.rank == 0:
            torch.save(state, path)
    policy.update(make_batch(seed=1), make_objective())
    return {"weights": {key: value.clone() for key, value in dict(policy.weights()).items()}}


def _whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    return full(state).clone() if isinstance(state, torch.Tensor) else state


def trained_parameters(ranks: Ranks) -> dict[str, Any]:
    """Whether the optimizer's parameters are the model's, before and after forwards that succeed and fail."""
    policy = policy_of({}, ranks)
    same = []

    def look() -> None:
        own = dict(policy.model.named_parameters())
        same.append(all(own[name] is p for name, p in policy.optimizer.parameters.items()))

    look()
    policy.logprobs(make_batch())
    look()
    policy.forward._agrees(torch.zeros(1), lambda: _fails_within_a_layer(policy.model))
    look()
    policy.update(make_batch(), make_objective())
    look()
    return {"same": same, "rank": ranks.rank}


def _fails_within_a_layer(model: Any) -> Any:
    layer = model.model.layers[0].mlp
    handle = layer.register_forward_pre_hook(_refuse)
    try:
        return model(input_ids=torch.arange(4)[None])
    finally:
        handle.remove()


def _refuse(*_: Any) -> None:
    raise ValueError("this layer refuses")


def talk(ranks: Ranks) -> dict[str, Any]:
    """What the verbs give on this rank."""
    found: dict[str, Any] = {
        "same": ranks.same(f"of {ranks.rank}"),
        "every": ranks.every(ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "sum": ranks.sum(torch.full((2,), float(ranks.rank + 1))).tolist(),
        "first": ranks.first(lambda: ranks.rank),
        "each": ranks.each(lambda: ranks.rank * 10),
        "beside": ranks.rollouts.every(ranks.rank),
    }
    for verb in ("first", "each"):
        try:
            getattr(ranks, verb)(partial(int, "1" if verb == "each" and ranks.rank == 0 else "x"))
        except Exception as error:
            found[f"{verb} error"] = [type(error).__name__, str(error), getattr(error, "exit_code", None)]
    return {"ranks": ranks.every(found)}


def whole_run(
    ranks: Ranks, file: str, overrides: list[str], variables: dict[str, str], stop: int = -1, mode: Mode = "new"
) -> dict[str, Any]:
    """A run from its TOML file; SIGTERM reaches rank 0 alone in step `stop`. Returns what it said, or each error."""
    os.environ.update(variables)
    said: list[str] = []

    def observe(event: str, details: Any) -> None:
        if event == "step" and details["step"] == stop:
            signal.raise_signal(signal.SIGTERM)
        said.append(details.get("text", event))

    try:
        run(load(Path(file), overrides), Resume(mode), observe, ranks)
        error = None
    except RetrainError as caught:
        error = [type(caught).__name__, str(caught), caught.exit_code]
    return {"said": said, "errors": ranks.every(error)}


CASES = {
    "whole_run": whole_run,
    "train": train,
    "resumed": resumed,
    "trained_parameters": trained_parameters,
    "talk": talk,
}


def main() -> None:
    """Join the ranks and run the cases that arrive as JSON lines; rank 0 writes what came of each to a file."""
    torch.set_num_threads(1)
    ranks = join("cpu", 60)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = CASES[asked["case"]](ranks, *asked["args"])
            if ranks.rank == 0:
                torch.save(found, asked["out"])
            print("done", flush=True)
        except Exception:
            print(json.dumps(traceback.format_exc()), flush=True)
    ranks.leave()


if __name__ == "__main__":
    main()
