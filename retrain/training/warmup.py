"""Warm start (`[warmup]`): supervised steps on the task's worked solutions, with the update of the policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from retrain.algorithms.graph.objective import Objective
from retrain.errors import DataError, DivergedError
from retrain.functional.seeds import digest_of
from retrain.protocols import ALONE, Ranks
from retrain.registry import find
from retrain.training.chat import Chat
from retrain.training.layout import Layout
from retrain.training.model.loading import Loaded, cast_weights, distinct
from retrain.training.policy import TorchPolicy
from retrain.training.reference import fingerprint
from retrain.training.settings import PolicySettings
from retrain.training.tensor_cache import cached
from retrain.types import ExpertRow, Observer, Problem
from retrain.version import __version__

_RECIPE = 2
"""Increase this number when the results of this module change, so that old cache entries are not used."""


@dataclass(frozen=True)
class WarmupSettings:
    """Settings of a warm start; the defaults suit `builtin:tiny`.

    Attributes:
        steps: number of optimizer steps. batch_size: worked solutions per step.
        lr: peak learning rate; it is reached after warmup_steps and then decays to 0 along a half cosine.
        warmup_steps: optimizer steps of the linear rise of the learning rate.
        dtype: dtype of the matrix products.
        seed: seed of random operations in the update, such as dropout; independent of the run's seed.
    """

    steps: int = 1000
    batch_size: int = 16
    lr: float = 1.5e-3
    warmup_steps: int = 50
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0


def warm_start(
    loaded: Loaded,
    problems: Sequence[Problem],
    settings: WarmupSettings,
    observe: Observer,
    *,
    rows: Sequence[ExpertRow] = (),
    ranks: Ranks = ALONE,
) -> bool:
    """Train the loaded model in place to imitate the problems' solutions, in order and repeatedly.

    Loss: mean of -log p(token) over the tokens of the solutions and the end-of-sequence token after each.

    Args:
        loaded: model, tokenizer and chat rendering.
        problems: at least one problem with a solution. They should not depend on the run's seed, so that runs with
            different seeds start from the same weights and share a cache entry.
        settings: see `WarmupSettings`.
        observe: called with `warmup` events: step, steps, loss and seconds left.
        rows: conversations to imitate instead of the problems' solutions, one per problem.
        ranks: rank 0 trains or reads the cache, and the others receive its weights.
    Returns:
        True if the weights came from the cache.
    Raises:
        DataError: a problem has no solution to imitate.
        DivergedError: the loss was not finite.
    """
    used = list(problems[: settings.steps * settings.batch_size])
    dtype: Any = loaded.model.dtype

    def build() -> dict[str, Tensor]:
        return _train(loaded, rows or demonstrations(loaded.chat, used), settings, observe)

    def made() -> tuple[dict[str, Tensor], bool]:
        facts = _facts(loaded, used, settings)
        facts |= {"rows": digest_of([asdict(row) for row in rows])} if rows else {}
        return cached("warmup", facts, build, waiting=lambda: observe("warmup_waiting", {}))

    # The group with the long timeout, because the others wait for the whole warm start.
    weights, hit = ranks.rollouts.on_rank0(made)
    # Tied weights are stored once, under one of their names.
    loaded.model.load_state_dict(weights, strict=False)
    loaded.model.tie_weights()
    # Training makes the weights float32 and the cache does not, so both are cast to the original dtype.
    cast_weights(loaded.model, dtype).eval()
    return hit


def demonstrations(chat: Chat, problems: Sequence[Problem]) -> list[ExpertRow]:
    """Render every problem's prompt and solution as an expert row.

    Raises:
        DataError: a problem has no solution, or its messages cannot be rendered.
    """
    for problem in problems:
        if problem.solution is None:
            raise DataError(
                f"problem {problem.id!r} has no solution to imitate; add one to each, or set [warmup] steps = 0"
            )
    return [chat.conversation(problem) for problem in problems]


def _train(loaded: Loaded, rows: Sequence[ExpertRow], settings: WarmupSettings, observe: Observer) -> dict[str, Tensor]:
    """Run the supervised steps; return a copy of the weights on the CPU, without names that are tied to others."""
    rise, steps = settings.warmup_steps, settings.steps
    shape = PolicySettings(
        lr=settings.lr, warmup_steps=rise, schedule="cosine", total_steps=steps, dtype=settings.dtype
    )
    policy = TorchPolicy(loaded.model, shape)
    layout = Layout(pad_id=0, device=policy.device, max_tokens=0)
    objective = Objective([find("loss", "sft").bind({"weight": 1.0})], find("reduction", "token_mean").bind())
    began = time.perf_counter()
    # The run's own random numbers must not depend on whether the cache was hit.
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        for step in range(settings.steps):
            first = step * settings.batch_size
            chosen = [rows[index % len(rows)] for index in range(first, first + settings.batch_size)]
            metrics = policy.update(layout.batch([], step, chosen), objective)
            if policy.nonfinite:
                raise DivergedError(f"the loss of warm-up step {step} is not finite; lower [warmup] lr")
            spent, done = time.perf_counter() - began, step + 1
            left = spent / done * (settings.steps - done)
            loss = metrics.get("loss/sft", float("nan"))
            observe("warmup", {"step": done, "steps": settings.steps, "loss": loss, "left_s": left})
    return {name: value.to("cpu", copy=True) for name, value in distinct(policy.weights()).items()}


def _facts(loaded: Loaded, problems: Sequence[Problem], settings: WarmupSettings) -> dict[str, Any]:
    """Return the cache's facts: everything that the weights depend on, as JSON values."""
    texts = [[problem.prompt, problem.solution] for problem in problems]
    return {
        "code": [__version__, _RECIPE],
        "architecture": loaded.model.config.to_json_string(use_diff=True),
        "weights": fingerprint(distinct(loaded.model.state_dict())),
        "tokenizer": digest_of(loaded.tokenizer.get_vocab(), loaded.tokenizer.chat_template),
        "problems": digest_of(texts),
        "settings": asdict(settings) | {"chat": loaded.mode} | dict(loaded.chat_params),
    }
