"""Everything about GPUs in one command: `make gpu-check`, at most ten minutes on one GPU.

Checks come first, and each must hold: log-probs and gradients in float32 and bfloat16 against a processor's, packed
against padded, the sampler against the trainer, its CUDA graphs against single steps, a checkpoint, one rank over NCCL,
and weights and moments that wait in the processor's memory. Then a table: tokens per second, model FLOP utilization and
peak memory of updates, tokens per second of the sampler with and without CUDA graphs, and LoRA, on a base in bfloat16
and in 4 bits, against the estimate of `explain`; a whole step against one of TRL's, if that is installed. These weights
are random: nothing is downloaded. Last, SmolLM2 from the cache learns sums for 50 steps, with its curve, sampled by the
embedded engine and by vLLM if that is installed, and a step of it against TRL's.

    python benchmarks/gpu_check.py [--cpu] [--json FILE]

`--cpu` rehearses every line with tiny shapes, and says nothing about a GPU. Exit codes: 0 all checks held, or there is
no GPU and nothing was checked; 1 a check failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import gpu_real
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from retrain.algorithms.graph.objective import Objective
from retrain.engines.embedded.decoder import Slots
from retrain.engines.embedded.static import StaticSlots
from retrain.engines.torch_engine import TorchEngine
from retrain.registry import find
from retrain.storage import checkpoint
from retrain.training.distributed.ranks import ALONE, RENDEZVOUS, Ranks, join
from retrain.training.memory import ModelShape, estimate_memory
from retrain.training.model.loading import Loaded
from retrain.training.model.quantized import quantize
from retrain.training.model.ragged import has_ragged_attention
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from retrain.types import Batch, Request, Sampling

PARITY = {"float32": 1e-3, "bfloat16": 0.15}
"""Nats per token between two ways to compute log-probs, that rounding explains."""
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "heads": 8, "key_heads": 2, "vocab": 512}
SHAPES = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "heads": 16},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "heads": 32, "tied": False},
}
"""What their config.json says; all have 8 key-value heads, heads of 128 and 151,936 tokens."""


@dataclass
class Row:
    """One line of the table; figures are medians."""

    what: str
    tokens_per_s: float
    utilization: float | None
    peak_gb: float | None
    note: str = ""


def model(shape: dict[str, Any], place: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen3 of this shape with random weights; a small one has the same weights on every device."""
    rest = dict(shape)
    heads, tied = rest.pop("heads"), rest.pop("tied", True)
    small = "vocab" in rest
    config = Qwen3Config(
        vocab_size=rest.pop("vocab", 151_936),
        num_attention_heads=heads,
        num_key_value_heads=rest.pop("key_heads", 8),
        head_dim=32 if small else 128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
        **rest,
    )
    torch.manual_seed(0)
    with torch.device("cpu") if small else place:
        return Qwen3ForCausalLM(config).to(place, dtype).eval()


def make_batch(place: torch.device, rows: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Groups of four with one prompt each, and responses of this length at most; no advantage is 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(response // 2, response + 1, (rows,), generator=generator)
    columns = torch.arange(prompt + response)[None]
    mask = columns < prompt + lengths[:, None]
    scored = mask & (columns >= prompt)
    ids = torch.randint(0, vocabulary, mask.shape, generator=generator)
    ids = ids[torch.arange(rows) // 4 * 4].where(columns < prompt, ids) * mask
    off = torch.zeros(rows, dtype=torch.bool)
    batch = Batch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=scored,
        sampler_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(rows),
        correct=off,
        lengths=lengths,
        group_ids=torch.arange(rows) // 4,
        is_expert=off,
        advantages=torch.randn(rows, 1, generator=generator) * scored,
        max_tokens=response,
    )
    moved = {name: value.to(place) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return batch.replace(**moved)


def objective() -> Objective:
    return Objective([find("loss", "ppo_clip").bind({})], find("reduction", "token_mean").bind({}))


def policy(place: torch.device, ranks: Ranks = ALONE, dtype: str = "float32", **changes: Any) -> TorchPolicy:
    settings: Any = PolicySettings(lr=1e-3, eps=1e-4, dtype=dtype, **changes)  # type: ignore[arg-type]
    return TorchPolicy(model(SMALL, place), settings, ranks)


def small_batch(place: torch.device) -> Batch:
    return make_batch(place, 16, 8, 40, SMALL["vocab"])


def updated(trained: TorchPolicy, place: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after two updates."""
    metrics = [trained.update(small_batch(place), objective()) for _ in range(2)]
    weights = trained.weights()
    return {name: weights[name].detach().cpu().clone() for name in weights}, metrics[-1]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def hold(name: str, value: float, limit: float) -> str:
    if not value <= limit:
        raise AssertionError(f"{name} is {value:.3g}, more than {limit:.3g}")
    return f"{name} {value:.2g}, at most {limit:.2g}"


def precision(place: torch.device) -> str:
    """Log-probs and gradient norm here in both precisions against those of a processor in float32."""
    processor, said = torch.device("cpu"), list[str]()
    batch = small_batch(processor)
    expected = policy(processor).logprobs(batch)["old_logprobs"]
    norm = policy(processor).update(batch, objective())["grad/norm"]
    for dtype, limit in PARITY.items():
        found = policy(place, dtype=dtype).logprobs(small_batch(place))["old_logprobs"].cpu()
        said.append(hold(f"{dtype} log-probs", float((found - expected)[batch.response_mask].abs().mean()), limit))
        here = policy(place, dtype=dtype).update(small_batch(place), objective())["grad/norm"]
        said.append(hold(f"{dtype} gradient", abs(here / norm - 1), 1e-3 if dtype == "float32" else 0.05))
    rounded = policy(place, dtype="bfloat16")
    with rounded.in_float32():
        found = rounded.logprobs(small_batch(place))["old_logprobs"].cpu()
    said.append(hold("log-probs in_float32", float((found - expected)[batch.response_mask].abs().mean()), 1e-3))
    return "; ".join(said)


def packing(place: torch.device) -> str:
    """The packed forward, its rows with and without padding, against the model's own attention: values and gradient."""
    said = list[str]()
    for dtype, limit in PARITY.items():
        one = policy(place, dtype=dtype).forward
        if not one.packed_limit:
            raise AssertionError(f"the probe refused the packed forward in {dtype}")
        if one.ragged != has_ragged_attention(place, getattr(torch, dtype)):
            raise AssertionError(f"the probe refused attention without padding in {dtype}")
        found = list[tuple[torch.Tensor, float]]()
        for ragged, packed in dict.fromkeys([(one.ragged, True), (False, True), (False, False)]):
            trained, batch = policy(place, dtype=dtype), small_batch(place)
            trained.forward.ragged, trained.forward.packed_limit = ragged, math.inf if packed else 0.0
            table = trained.logprobs(batch)["old_logprobs"][batch.response_mask]
            found.append((table, trained.update(batch, objective())["grad/norm"]))
        ways = f"largest difference of {len(found)} ways in {dtype}"
        said.append(hold(ways, max(float((table - found[0][0]).abs().mean()) for table, _ in found), limit))
        slack = 1e-3 if dtype == "float32" else 0.05
        said.append(hold("gradient", max(abs(norm / found[0][1] - 1) for _, norm in found), slack))
    return "; ".join(said)


def engine(made: Any, dtype: Literal["float32", "bfloat16"], graphs: bool) -> TorchEngine:
    """The sampler; without CUDA graphs it launches the kernels of every decode step one by one."""
    sampler = TorchEngine(made, dtype=dtype, memory_mb=32_000)
    if not graphs:
        sampler._decoder.kind = Slots
    return sampler


def graphs(place: torch.device) -> str:
    """Decode steps that a CUDA graph replays sample what single steps sample; rows end at different times."""
    made = model(SMALL, place)
    requests = [Request(tuple(range(1, 4 + stream)), 8, 300, stream) for stream in range(4)]
    sampling = Sampling(stop_ids=tuple(range(4)), seed=3)
    groups = [engine(made, "float32", on).sample(requests, sampling) for on in (True, False)]
    if StaticSlots.failed:
        raise AssertionError(f"no graph was captured: {StaticSlots.failed}")
    pairs = [pair for both in zip(*groups, strict=True) for pair in zip(*both, strict=True)]
    other = sum(one.ids != two.ids for one, two in pairs) / len(pairs)
    return hold(f"share of {len(pairs)} completions that differ", other, 0.05)


def sampler(place: torch.device) -> str:
    """The engine's own log-probs of what it samples against the trainer's."""
    said = list[str]()
    for dtype, limit in PARITY.items():
        trained = policy(place, dtype=dtype)
        engine = TorchEngine(trained.model, dtype=dtype)  # type: ignore[arg-type]
        engine.load_weights(trained.weights(), 0)
        prompts = [(3, 1, 4, 1, 5), (9, 2, 6)]
        requests = [Request(ids, 4, 24, stream) for stream, ids in enumerate(prompts)]
        groups = engine.sample(requests, Sampling(stop_ids=(0,), seed=3))
        rows = [(ids, one) for ids, group in zip(prompts, groups, strict=True) for one in group]
        width = max(len(ids) + len(one.ids) for ids, one in rows)
        batch = make_batch(place, len(rows), 1, width - 1, SMALL["vocab"])
        table = {
            name: torch.zeros_like(getattr(batch, name)) for name in ("input_ids", "attention_mask", "response_mask")
        }
        own = torch.zeros_like(batch.sampler_logprobs)
        for row, (ids, one) in enumerate(rows):
            first, end = len(ids), len(ids) + len(one.ids)
            table["input_ids"][row, :end] = torch.tensor([*ids, *one.ids])
            table["attention_mask"][row, :end], table["response_mask"][row, first:end] = True, True
            own[row, first:end] = torch.tensor(one.logprobs)
        batch = batch.replace(**table)
        found = trained.logprobs(batch)["old_logprobs"]
        said.append(hold(dtype, float((found - own)[batch.response_mask].abs().mean()), limit))
    return "; ".join(said)


def compiled(place: torch.device) -> str:
    """Compiled layers and scores of tokens against the same update without compiling: log-probs, gradient, entropy."""
    tables, metrics = list[torch.Tensor](), list[dict[str, float]]()
    for compile in (False, True):
        trained = policy(place, dtype="bfloat16", gradient_checkpointing=True, compile=compile)
        if compile and place.type == "cuda" and not trained.forward.compiled:
            raise AssertionError("the trial refused compiled layers")
        batch = small_batch(place)
        tables.append(trained.logprobs(batch)["old_logprobs"][batch.response_mask])
        metrics.append(trained.update(batch, objective()))
    said = [hold("log-probs", float((tables[0] - tables[1]).abs().mean()), PARITY["bfloat16"])]
    for name in ("grad/norm", "policy/entropy"):
        said.append(hold(name, abs(metrics[1][name] / metrics[0][name] - 1), 0.05))
    return "; ".join(said)


@contextmanager
def deterministic() -> Generator[None]:
    """Use deterministic algorithms inside this block: others add in an order that differs between repetitions."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@deterministic()
def round_trip(place: torch.device) -> str:
    """With deterministic algorithms a policy from a checkpoint continues with the same bits, compiled or not."""
    return "; ".join(one_round_trip(place, compile) for compile in (False, True))


def one_round_trip(place: torch.device, compile: bool) -> str:
    first, batch = policy(place, dtype="bfloat16", compile=compile), small_batch(place)
    first.update(batch, objective())
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(Path(folder), 1, {"policy": first.state_dict()}, 1)
        again = policy(place, dtype="bfloat16", compile=compile)
        again.load_state_dict(checkpoint.load(path)["policy"])
    for one in (first, again):
        one.update(batch, objective())
    name = "weights, compiled" if compile else "weights"
    return hold(name, distance(dict(first.weights()), dict(again.weights())), 0.0)


@deterministic()
def one_rank(place: torch.device) -> str:
    """A group of one (NCCL on a GPU) has the weights of a process alone, whatever waits in the processor's memory."""
    said = list[str]()
    expected = updated(policy(place), place)[0]
    said.append(
        hold("offload = optimizer", distance(updated(policy(place, offload="optimizer"), place)[0], expected), 0.0)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", RENDEZVOUS: f"file://{folder}/store"}
        ranks = join(place.type, 60)
        try:
            cases = {"full": {}, "LoRA": {"lora": LoraSettings(r=4)}, "offload = all": {"offload": "all"}}
            for name, changes in cases.items():
                alone = updated(policy(place, **(changes if name == "LoRA" else {})), place)[0]
                limit = 1e-4 if name == "offload = all" else 0.0  # there the processor applies the step
                said.append(hold(name, distance(updated(policy(place, ranks, **changes), place)[0], alone), limit))
        finally:
            ranks.leave()
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", RENDEZVOUS):
                del os.environ[name]
    return "; ".join(said)


CHECKS: tuple[Callable[[torch.device], str], ...] = (
    precision,
    packing,
    compiled,
    sampler,
    graphs,
    round_trip,
    one_rank,
)


def timed(step: Callable[[], object], place: torch.device, count: int) -> float:
    """Median seconds, after one call that is not counted."""
    seconds = list[float]()
    for number in range(count + 1):
        began = time.perf_counter()
        step()
        if place.type == "cuda":
            torch.cuda.synchronize()
        seconds += [time.perf_counter() - began] if number else []
    return statistics.median(seconds)


def matmul_rate(place: torch.device, size: int) -> float:
    """Measured FLOP/s of a square product in bfloat16: what utilization is a share of."""
    matrix = torch.randn(size, size, device=place, dtype=torch.bfloat16)
    return 2 * size**3 / timed(lambda: matrix @ matrix, place, 10)


def peak(place: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(place) / 1e9 if place.type == "cuda" else None


def fresh(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place)


def update_row(  # noqa: PLR0913 - where, and what differs from the recipe
    name: str,
    shape: dict[str, Any],
    place: torch.device,
    rate: float,
    rows: int,
    response: int,
    *,
    compile: bool = True,
    checkpointing: bool = True,
) -> Row:
    """An update in bfloat16, by default with gradient checkpointing; recomputation counts as overhead, not as work."""
    fresh(place)
    settings = PolicySettings(
        lr=1e-6, dtype="bfloat16", gradient_checkpointing=checkpointing, micro_batch_tokens=16384, compile=compile
    )
    trained = TorchPolicy(model(shape, place), settings)
    batch = make_batch(place, rows, 64, response, trained.model.config.vocab_size)
    seconds = timed(lambda: trained.update(batch, objective()), place, 3)
    config, tokens = trained.model.config, int(batch.attention_mask.sum())
    attention = (
        12
        * config.num_hidden_layers
        * config.num_attention_heads
        * config.head_dim
        * float(batch.lengths.float().mean())
    )
    work = 6 * ModelShape.of(config.to_dict()).parameters + attention
    note = ", ".join(["compiled"] * compile + ["no gradient checkpointing"] * (not checkpointing))
    return Row(f"update {name}", tokens / seconds, work * tokens / seconds / rate, peak(place), note)


def sample_rows(name: str, shape: dict[str, Any], place: torch.device, rows: int, length: int) -> Iterator[Row]:
    """The sampler with and without CUDA graphs."""
    made = model(shape, place, torch.bfloat16)
    for graphs in (True, False):
        yield sample_row(name, made, place, rows, length, graphs)


def sample_row(name: str, made: Any, place: torch.device, rows: int, length: int, graphs: bool) -> Row:
    fresh(place)
    sampler = engine(made, "bfloat16", graphs)
    requests = [Request(tuple(range(1, 65)), 8, length, stream) for stream in range(rows // 8)]
    seconds = timed(lambda: sampler.sample(requests, Sampling(stop_ids=(0,), seed=1)), place, 2)
    note = f"{rows} rows of {length}, with{'' if graphs else 'out'} CUDA graphs"
    return Row(f"sample {name}", rows * length / seconds, None, peak(place), note)


def lora_rows(name: str, shape: dict[str, Any], place: torch.device, rows: int, response: int) -> Iterator[Row]:
    """LoRA on a base in bfloat16, and in 4 bits where bitsandbytes is installed."""
    yield lora_row(name, shape, place, rows, response, None)
    if find_spec("bitsandbytes"):
        yield lora_row(name, shape, place, rows, response, "nf4")
    else:
        print(f"LoRA {name} on nf4: NOT MEASURED, bitsandbytes is not installed", flush=True)


def lora_row(
    name: str,
    shape: dict[str, Any],
    place: torch.device,
    rows: int,
    response: int,
    quantization: Literal["nf4"] | None,
) -> Row:
    """LoRA, with the peak of its memory over what `explain` estimates."""
    fresh(place)
    settings = PolicySettings(
        lr=1e-5,
        dtype="bfloat16",
        gradient_checkpointing=True,
        lora=LoraSettings(r=32),
        quantization=quantization,
        compile=True,
    )
    made = model(shape, place, torch.bfloat16)
    if quantization:
        made = quantize(Loaded(made, None, (0,), name), place).model
    trained = TorchPolicy(made, settings)
    fresh(place)  # the loader, unlike this function, quantizes one matrix at a time
    batch = make_batch(place, rows, 64, response, trained.model.config.vocab_size)
    seconds = timed(lambda: trained.update(batch, objective()), place, 2)
    sizes = estimate_memory(ModelShape.of(trained.model.config.to_dict()), settings, rows=rows, tokens=64 + response)
    estimate = sum(size for what, size in sizes.items() if what not in ("sampler_weights", "kv_cache")) / 1e9
    found = peak(place)
    note = f"estimate {estimate:.1f} GB" + (f", {found / estimate:.2f} times that is used" if found else "")
    title = f"LoRA {name}" + (f" on {quantization}" if quantization else "")
    return Row(title, int(batch.attention_mask.sum()) / seconds, None, found, note)


def against_trl(place: torch.device) -> str:
    """Compare a whole step with one of TRL's by `step.py`, at the shape of SmolLM2-135M with random weights."""
    options = ["--shape", "135M", "--steps", "3"] if place.type == "cuda" else ["--shape", "1.4M", "--steps", "1"]
    return gpu_real.compared_with_trl("a step against TRL", "step.py", place, [*options, "--dtypes", "bfloat16"])


def table(place: torch.device) -> Iterator[Row]:
    """All measurements; tiny shapes on a processor."""
    if place.type == "cpu":
        rate = matmul_rate(place, 256)
        yield update_row("tiny", SMALL, place, rate, 8, 24)
        yield update_row("tiny, long rows", SMALL, place, rate, 2, 256)
        yield from sample_rows("tiny", SMALL, place, 8, 8)
        yield from lora_rows("tiny", SMALL, place, 8, 24)
        return
    rate = matmul_rate(place, 8192)
    print(f"bfloat16 product of 8192: {rate / 1e12:.0f} TFLOP/s", flush=True)
    for name in ("qwen3-0.6b", "qwen3-1.7b"):
        for compile in (False, True):
            yield update_row(name, SHAPES[name], place, rate, 64, 1024, compile=compile)
    yield update_row("qwen3-0.6b", SHAPES["qwen3-0.6b"], place, rate, 64, 1024, checkpointing=False)
    yield update_row("qwen3-0.6b, rows of 8k", SHAPES["qwen3-0.6b"], place, rate, 8, 8192)
    for name in ("qwen3-0.6b", "qwen3-1.7b"):
        yield from sample_rows(name, SHAPES[name], place, 128, 256)
    yield from lora_rows("qwen3-8b", SHAPES["qwen3-8b"], place, 16, 1024)


def shown(row: Row) -> Row:
    """Print a row as soon as it is measured."""
    share = "" if row.utilization is None else f"{row.utilization:.1%}"
    most = "" if row.peak_gb is None else f"{row.peak_gb:.1f}"
    print(f"{row.what:<31}{row.tokens_per_s:>12,.0f}{share:>13}{most:>9}  {row.note}", flush=True)
    return row


def real_model(place: torch.device) -> str:
    """Train SmolLM2 and compare a step of it with TRL's, by `gpu_real.py`."""
    rate = matmul_rate(place, 8192 if place.type == "cuda" else 256)
    try:
        return f"{gpu_real.recipe(place, rate)}\n{gpu_real.against_trl(place)}"
    except Exception:  # the table before it is not lost
        return f"SmolLM2: FAILED\n{traceback.format_exc()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="rehearse with tiny shapes on a processor")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("NO GPU HERE: NOTHING WAS CHECKED. `--cpu` rehearses the check itself.", file=sys.stderr)
        return 0
    place = torch.device("cpu" if options.cpu else "cuda")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    device = "a processor, in rehearsal" if options.cpu else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {device}", flush=True)
    failed, said = 0, dict[str, str]()
    for check in CHECKS:
        try:
            said[check.__name__] = f"ok: {check(place)}"
        except Exception:
            failed += 1
            said[check.__name__] = f"FAILED\n{traceback.format_exc()}"
        print(f"{check.__name__:<12}{said[check.__name__]}", flush=True)
    torch.compiler.reset()  # few variants of a function are compiled in one process
    print(f"\n{'':<31}{'tokens/s':>12}{'utilization':>13}{'peak GB':>9}")
    rows = [shown(row) for row in table(place)]
    trl, real = against_trl(place), real_model(place)
    print(f"\n{trl}\n{real}", flush=True)
    if options.json:
        facts = {"torch": torch.__version__, "device": device, "checks": said, "trl": trl, "real": real}
        facts["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(CHECKS) - failed} of {len(CHECKS)} checks held", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
