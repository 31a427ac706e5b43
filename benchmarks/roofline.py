"""Where the time of a step goes, by kind of operation, and what share its matrix products alone would take.

Three shapes (`shapes.py`), one core, CPU seconds; every completion has its full length and every row is trained on.

    sampling   the embedded engine samples the whole batch
    update     one optimizer step on it
    rest       the weights go to the sampler, and completions become a batch; rewards and credit are not in it

The limit of a phase is the time that its matrix products (attention's not included) take when each is repeated alone,
with as many different weights as the phase has, so that weights which do not fit a cache come from memory. The
share is the limit over the phase's time. Kinds are shares of the phase under torch's profiler, whose own cost makes
many small operations look dearer; `other` is what no operator accounts for: Python and the dispatcher.

    python benchmarks/roofline.py [--shapes 1.4M 20M 135M] [--dtype bfloat16] [--repeats 3]
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from shapes import PROMPT, SHAPES, Shape
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.algorithms.graph.objective import Objective
from retrain.engines.torch_engine import TorchEngine
from retrain.registry import find
from retrain.training.policy import TorchPolicy
from retrain.training.settings import PolicySettings
from retrain.types import Batch, Completion, Request, Sampling

KINDS = {
    "products": r"mm|addmm|linear|mkldnn_linear",
    "attention": r"_scaled_dot_product.*|bmm|baddbmm",
    "copies": r"copy_|clone|cat|index.*|gather|.*scatter.*|embedding.*|repeat.*|fill_|zero_",
    "elementwise": r"(mul|add|sub|div|neg|exp|rsqrt|clamp.*)_?|rsub|pow|silu.*|where|addcmul|sigmoid.*|roll",
    "reductions": r"sum|mean|.*softmax.*|cumsum|linalg_vecdot|linalg_vector_norm|searchsorted|max|min|any|all",
    "optimizer": r"_fused_adamw_|_foreach.*",
}
_FULL = 128 << 20
"""Bytes of different operands after which no cache holds one of them."""
Phase = Callable[[], object]


class Product(NamedTuple):
    """A matrix product as it was called: operator, shape, order of the dimensions and type of each operand."""

    name: str
    operands: tuple[tuple[tuple[int, ...], bool, torch.dtype], ...]

    @property
    def work(self) -> int:
        """Floating-point operations."""
        left, right = (shape for shape, _, _ in self.operands)
        return 2 * math.prod(left[:-1]) * math.prod(right)


class Products(TorchDispatchMode):
    """Counts the matrix products inside it, and how many different weights each has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[Product]()
        self.weights: dict[Product, set[int]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "linear"):
            operands = args[:2] if name == "linear" else args[-2:]
            product = Product(name, tuple((tuple(x.shape), not x.is_contiguous(), x.dtype) for x in operands))
            self.calls[product] += 1
            self.weights[product].update(x.data_ptr() for x in operands[1:])
        return func(*args, **(kwargs or {}))

    def alone(self) -> tuple[float, float]:
        """CPU seconds of all products, each repeated alone, and their billions of operations a second."""
        seconds = sum(count * _alone(product, len(self.weights[product])) for product, count in self.calls.items())
        return seconds, sum(count * product.work for product, count in self.calls.items()) / seconds / 1e9


@torch.inference_mode()
def _alone(product: Product, different: int) -> float:
    """CPU seconds of one product, in turn with `different` weights."""

    def make(shape: tuple[int, ...], flipped: bool, dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(shape[::-1] if flipped else shape, dtype=torch.float32).to(dtype)
        return made.T if flipped else made

    left, right = product.operands
    first = make(*left)
    size = math.prod(right[0]) * right[2].itemsize
    weights = [make(*right) for _ in range(min(different, -(-_FULL // size)))]
    run = torch.nn.functional.linear if product.name == "linear" else torch.mm
    for weight in weights:
        run(first, weight)
    rounds, began = 0, time.process_time()
    while (spent := time.process_time() - began) < 0.1 or rounds < 2:
        for weight in weights:
            run(first, weight)
        rounds += 1
    return spent / (rounds * len(weights))


def phases(shape: Shape, dtype: str) -> Iterator[tuple[str, Phase]]:
    """The phases of one step, in order; each leaves what the next works on."""
    model, made = shape.model(), dict[str, Any]()
    engine = TorchEngine(model, dtype=dtype)  # type: ignore[arg-type]
    policy = TorchPolicy(model, PolicySettings(dtype=dtype))  # type: ignore[arg-type]
    objective = Objective([find("loss", "ppo_clip").bind({})], find("reduction", "token_mean").bind({}))
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(tuple(torch.randint(8, 128, (PROMPT,), generator=generator).tolist()), shape.group, shape.tokens, index)
        for index in range(shape.prompts)
    ]

    def sampling() -> None:
        made["groups"] = engine.sample(requests, Sampling(seed=0))

    def rest() -> None:
        engine.load_weights(policy.weights(), 0)
        made["batch"] = _batch(requests, made["groups"])

    yield "sampling", sampling
    if not made:
        sampling()
    rest()
    yield "update", lambda: policy.update(made["batch"], objective)
    yield "rest", rest


def _batch(requests: list[Request], groups: list[list[Completion]]) -> Batch:
    rows = [(request, one) for request, group in zip(requests, groups, strict=True) for one in group]
    ids = torch.tensor([[*request.ids, *one.ids] for request, one in rows])
    mask = torch.ones_like(ids, dtype=torch.bool)
    scored = (torch.arange(ids.shape[1]) >= PROMPT).expand_as(ids)
    off = torch.zeros(len(rows), dtype=torch.bool)
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=scored,
        sampler_logprobs=torch.zeros(ids.shape).masked_scatter(scored, torch.tensor([one.logprobs for _, one in rows])),
        rewards=torch.zeros(len(rows)),
        correct=off,
        lengths=scored.sum(-1),
        group_ids=torch.arange(len(rows)) // requests[0].count,
        is_expert=off,
        advantages=torch.randn(len(rows), 1, generator=torch.Generator().manual_seed(0)) * scored,
        max_tokens=requests[0].max_tokens,
    )


def seconds(phase: Phase, repeats: int) -> float:
    """Median CPU seconds of a phase, after one run that is not counted."""
    phase()
    found: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        phase()
        found.append(time.process_time() - began)
    return median(found)


def limit(phase: Phase) -> tuple[float, float]:
    """CPU seconds of the phase's matrix products alone, and their rate in GFLOP/s; zeros without a product."""
    with Products() as products:
        phase()
    return products.alone() if products.calls else (0.0, 0.0)


def share(phase: Phase, repeats: int) -> float:
    """The limit over the phase's time."""
    return limit(phase)[0] / seconds(phase, repeats)


def kinds(phase: Phase) -> dict[str, float]:
    """Share of every kind of operation, by its own time; Python between operations is `other`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.process_time()
        phase()
        whole = time.process_time() - began
    spent = _self_times(profiler)
    spent["other"] = max(0.0, whole - sum(spent.values()) + spent["other"])
    total = sum(spent.values())
    return {kind: spent[kind] / total for kind in (*KINDS, "other")}


def _self_times(profiler: Any) -> Counter[str]:
    """Seconds of every kind, without what an operator calls; `key_averages` takes longer than the phase itself."""
    spent, within = Counter[str](), dict[int, list[tuple[int, str]]]()
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda one: (one.start_ns(), -one.end_ns())):
        kind, seconds = _kind(event.name()), event.duration_ns() / 1e9
        around = within.setdefault(event.start_thread_id(), [])
        while around and around[-1][0] <= event.start_ns():
            around.pop()
        if around:
            spent[around[-1][1]] -= seconds
        spent[kind] += seconds
        around.append((event.end_ns(), kind))
    return spent


@cache
def _kind(operator: str) -> str:
    name = operator.removeprefix("aten::")
    name = re.sub(r".*::evaluate_function.*|.*Backward\d*$", "other", name)
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "other")


@torch.inference_mode()
def machine() -> str:
    """What one core does at best: products of two large matrices, and a copy in memory."""
    found: list[str] = []
    for dtype in (torch.bfloat16, torch.float32):
        product = Product("mm", (((2048, 2048), False, dtype), ((2048, 2048), False, dtype)))
        found.append(f"{str(dtype)[6:]} {product.work / _alone(product, 1) / 1e9:.0f} GFLOP/s")
    source = torch.ones(1 << 26)
    target, times = torch.empty_like(source), list[float]()
    for _ in range(5):
        began = time.process_time()
        target.copy_(source)
        times.append(time.process_time() - began)
    return ", ".join([*found, f"memory {2 * source.nbytes / median(times) / 1e9:.0f} GB/s"])


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--phases", nargs="+", default=["sampling", "update", "rest"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.dtype}, one core: {machine()}\n")
    titles = ["shape", "phase", "CPU s", "limit s", "share", "GFLOP/s", *KINDS, "other"]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for name in options.shapes:
        for title, phase in phases(SHAPES[name], options.dtype):
            if title in options.phases:
                spent, (least, rate) = seconds(phase, options.repeats), limit(phase)
                cells = [name, title, f"{spent:.3f}", f"{least:.3f}", f"{least / spent:.0%}", f"{rate:.0f}"]
                cells += [f"{part:.0%}" for part in kinds(phase).values()]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
