"""Updates that one process and several ranks must agree on; `python -m` this file is a rank."""

import ctypes
import gc
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tomli
import torch
from torch.distributed.tensor import DTensor

from retrain.config.load import load
from retrain.protocols import Ranks
from retrain.registry import find
from retrain.run.session import Resume, run
from retrain.storage.checkpoint import save
from retrain.storage.run_directory import ExistingRun
from retrain.training.auxiliary.critic import Critic
from retrain.training.distributed.ranks import join
from retrain.training.distributed.sharded_tensors import local
from retrain.training.model.loading import Loaded, load_model
from retrain.training.model.quantized import quantize
from retrain.training.policy import TorchPolicy
from retrain.training.prm import ProcessRewards
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.small_models import make_batch, make_model, make_objective

TABLE: dict[str, dict[str, Any]] = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
STEPS = 3
SCORED = ("input_ids", "attention_mask", "response_mask", "sampler_logprobs")


def policy_of(case: dict[str, Any], ranks: Ranks) -> TorchPolicy:
    # AdamW divides by sqrt(v) + eps: with a small eps rounding moves a weight without gradient by lr.
    changes = {"lr": 1e-3, "eps": 1e-4, **case.get("settings", {})}
    if "lora" in changes:
        changes["lora"] = LoraSettings(**changes["lora"])
    model: Any = make_model(case.get("model", "qwen3"))
    if "quantization" in changes:
        model = quantize(Loaded(model, None, (0,), "small"), torch.device("cpu")).model  # type: ignore[arg-type]
    return TorchPolicy(model, PolicySettings(**changes), ranks)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def watch(policy: TorchPolicy, caught: list[dict[str, torch.Tensor]]) -> None:
    """Keep the whole gradients that the optimizer applies."""
    optimizer: Any = policy.optimizer
    apply = optimizer.step

    def step(number: int) -> float:
        caught.append({name: full(p.grad).clone() for name, p in policy.optimizer.parameters.items()})
        return apply(number)

    optimizer.step = step


def train(ranks: Ranks, name: str, offload: str = "none") -> dict[str, Any]:
    """Three updates with scoring before each; returns gradients, weights, tables and metrics."""
    case = {**TABLE[name], "settings": {**TABLE[name].get("settings", {}), "offload": offload}}
    policy, gradients, metrics, tables = policy_of(case, ranks), [], [], []
    prm = ProcessRewards(policy, None, **case["prime"]) if "prime" in case else None
    critic = Critic(policy, None, **case["critic"]) if "critic" in case else None
    watch(policy, gradients)
    for step in range(STEPS):
        options = dict(case.get("batch", {}))
        experts = options.pop("experts", 0)
        batch = make_batch(seed=step, **options)
        batch = batch.replace(is_expert=torch.arange(len(batch.correct)) >= len(batch.correct) - experts, mu=0.3)
        batch = batch.replace(correct=torch.arange(len(batch.correct)) % 3 == 0)
        tables.append(policy.logprobs(batch, ("old_logprobs", "entropy", "varentropy")))
        reported = {}
        if prm is not None:
            batch = batch.replace(process_rewards=prm(*(getattr(batch, name) for name in SCORED)))
            tables.append({"process_rewards": batch.column("process_rewards")})
            reported = prm.after(batch)
        if critic is not None:
            batch = batch.replace(values=critic(*(getattr(batch, name) for name in SCORED)))
            tables.append({"values": batch.column("values")})
            reported = critic.after(batch)
        policy.remember()
        reported |= policy.update(batch, make_objective(*case.get("terms", ("ppo_clip", "entropy"))))
        tables.append({"earlier": policy.earlier_logprobs(batch)})
        metrics.append(reported)
    weights: dict[str, Any] = {"policy": policy, **({"prm": prm.model} if prm else {})}
    weights |= {"critic": critic.model} if critic else {}
    found = {
        f"{key}.{name}": value.clone() for key, one in weights.items() for name, value in dict(one.weights()).items()
    }
    found |= {name: value.clone() for name, value in critic.model.head_weights().items()} if critic else {}
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
    policy.forward._agrees(torch.zeros(1), lambda: _fails_within_a_layer(policy.model), 0.1)
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


def dropped(ranks: Ranks) -> dict[str, Any]:
    """What LoRA's dropout leaves of ones on every rank in two steps, and the next random number of each rank."""
    lora = {"r": 4, "dropout": 0.5}
    policy = policy_of({"settings": {"lora": lora, "minibatches": 2}, "model": "qwen3"}, ranks)
    torch.manual_seed(3)
    kept: list[torch.Tensor] = []
    layer = next(one for name, one in policy.model.named_modules() if name.endswith("lora_dropout.default"))

    def look(module: Any, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and len(kept) < 2 * policy.step + 2:
            with torch.random.fork_rng(devices=[]):
                kept.append(torch.nn.functional.dropout(torch.ones(64), 0.5))

    layer.register_forward_pre_hook(look)
    for seed in range(2):
        policy.update(make_batch(seed=seed), make_objective())
    weights = {name: full(value).clone() for name, value in dict(policy.weights()).items()}
    return {"kept": ranks.all_gather(torch.stack(kept)), "next": ranks.all_gather(torch.rand(1)), "weights": weights}


def held(ranks: Ranks) -> dict[str, Any]:
    """The share of the whole that each rank holds of a policy, its optimizer, PRIME's twin and the frozen reference."""
    policy = policy_of({}, ranks)
    prm = ProcessRewards(policy, None, lr=1e-3)
    batch = make_batch().replace(correct=torch.arange(8) % 3 == 0)
    batch = batch.replace(process_rewards=prm(*(getattr(batch, name) for name in SCORED)))
    policy.update(batch, make_objective())
    prm.after(batch)
    twin: Any = prm.model
    models = {"policy": policy.model, "twin": twin.model, "reference": policy._frozen.model}
    tensors = {name: list(model.parameters()) for name, model in models.items()}
    for name, one in (("moments", policy), ("moments of the twin", twin)):
        states = one.optimizer.state_dict().values()
        tensors[name] = [value for state in states for value in state.values() if value.ndim]
    shares = {
        name: sum(local(value).numel() for value in found) / sum(value.numel() for value in found)
        for name, found in tensors.items()
    }
    return {"shares": ranks.all_gather(shares)}


def gathers(ranks: Ranks, engine: str, lora: bool) -> dict[str, Any]:
    """How many elements are gathered while an engine gets the weights, as a multiple of the model."""
    case = {"settings": {"lora": {"r": 4, "seed": 3}} if lora else {}}
    policy, count = policy_of(case, ranks), 0
    sampler = find("engine", engine).bind({}).build({"model": policy.adapter or policy.model, "device": policy.device})
    weights: Any = policy.weights()
    base = weights
    kind: Any = DTensor
    whole_tensor = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
        nonlocal count
        count += tensor.numel()
        return whole_tensor(tensor, **options)

    kind.full_tensor = counted
    try:
        sampler.load_weights(weights, 0)
    finally:
        kind.full_tensor = whole_tensor
    total = sum(math.prod(base.shapes[name]) for name in base.untied)
    embedding = math.prod(next(iter(base.shapes.values())))
    return {"times": count / total, "head": embedding / total}


def from_files(ranks: Ranks, folder: str, lora: bool) -> dict[str, Any]:
    """A policy of a model that every rank reads shard by shard, after an update; and the most that it held before."""
    settings = PolicySettings(lr=1e-3, eps=1e-4, lora=LoraSettings(r=4, seed=3) if lora else None)
    _count_from_here()
    most = 0
    loaded: Any = load_model(folder, empty=ranks.size > 1)

    def watched(name: str) -> torch.Tensor:
        nonlocal most
        value = loaded.source(name)
        if name.endswith(("embed_tokens.weight", "down_proj.weight")):
            most = max(most, _tensor_bytes())
        return value

    policy = TorchPolicy(loaded.model, settings, ranks, watched if loaded.source else None)
    most = max(most, _tensor_bytes())
    policy.update(make_batch(), make_objective())
    weights = {name: value.clone() for name, value in dict(policy.weights()).items()}
    size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    return {"weights": weights, "most": ranks.all_gather(most), "size": size, "empty": loaded.source is not None}


def _count_from_here() -> None:
    """Leave out the tensors that are there by now; to look through all of them takes seconds."""
    gc.collect()
    gc.freeze()


def _tensor_bytes() -> int:
    """Bytes of the tensors made since `_count_from_here`, each memory once; those that FSDP has freed have none."""
    gc.collect()
    alive = [
        one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not issubclass(type(one), DTensor)
    ]
    sizes: dict[int, int] = {}
    for one in alive:
        if one.device.type == "cpu" and (storage := one.untyped_storage()).nbytes():
            sizes[storage.data_ptr()] = max(sizes.get(storage.data_ptr(), 0), min(one.nbytes, storage.nbytes()))
    return sum(sizes.values())


def memory(ranks: Ranks, folder: str, out: str) -> dict[str, Any]:
    """Bytes of tensors that each rank holds after an update, and adds at most while it saves and hands weights over."""
    added = dict[str, int]()
    _count_from_here()
    loaded: Any = load_model(folder, empty=ranks.size > 1)
    policy = TorchPolicy(loaded.model, PolicySettings(lr=1e-3, eps=1e-4), ranks, loaded.source)
    del loaded
    policy.update(make_batch(), make_objective())
    held = _tensor_bytes()
    with _peak(added, "checkpoint"):
        save(Path(out), 1, {"policy": policy.state_dict()}, 1, ranks)
    with _peak(added, "sync"):
        largest = max(value.nbytes for value in policy.weights().values())
    return {"held": ranks.all_gather(held), "added": ranks.all_gather(added), "largest": largest}


@contextmanager
def _peak(found: dict[str, int], name: str) -> Generator[None]:
    """Bytes that the process adds at most in this block, whatever they are for."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    yield
    found[name] = _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return 1024 * int(line.split()[1])


def talk(ranks: Ranks) -> dict[str, Any]:
    """What the verbs give on this rank."""
    found: dict[str, Any] = {
        "broadcast": ranks.broadcast(f"of {ranks.rank}"),
        "all_gather": ranks.all_gather(ranks.rank),
        "all_reduce": ranks.all_reduce(torch.full((2,), float(ranks.rank + 1))).tolist(),
        "on_rank0": ranks.on_rank0(lambda: ranks.rank),
        "on_each_rank": ranks.on_each_rank(lambda: ranks.rank * 10),
        "beside": ranks.rollouts.all_gather(ranks.rank),
    }
    for verb in ("on_rank0", "on_each_rank"):
        try:
            getattr(ranks, verb)(partial(int, "1" if verb == "on_each_rank" and ranks.rank == 0 else "x"))
        except Exception as error:
            found[f"{verb} error"] = [type(error).__name__, str(error), getattr(error, "exit_code", None)]
    return {"ranks": ranks.all_gather(found)}


def whole_run(
    ranks: Ranks, file: str, overrides: list[str], variables: dict[str, str], stop: int = -1, mode: ExistingRun = "new"
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
    except Exception as caught:  # whatever it is, the other ranks wait for this one to say it
        error = [type(caught).__name__, str(caught), getattr(caught, "exit_code", 1)]
    return {"said": said, "errors": ranks.all_gather(error)}


CASES = {
    case.__name__: case
    for case in (whole_run, train, resumed, trained_parameters, dropped, held, gathers, from_files, memory, talk)
}


def main() -> None:
    """Join the ranks and run the cases that arrive as JSON lines; rank 0 writes what came of each to a file."""
    torch.set_num_threads(1)
    ranks = join("cpu", 300)
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
