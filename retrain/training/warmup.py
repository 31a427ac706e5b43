"""`[warmup]`: supervised steps on the task's worked solutions, through the policy's own update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from retrain import __version__
from retrain.algorithms.graph.objective import Objective
from retrain.errors import DataError, DivergedError
from retrain.protocols import ALONE, Ranks
from retrain.registry import find
from retrain.training.chat import Chat
from retrain.training.layout import Layout
from retrain.training.model.loading import Loaded, cast_weights, distinct
from retrain.training.policy import TorchPolicy
from retrain.training.reference import fingerprint
from retrain.training.settings import PolicySettings
from retrain.training.tensor_cache import cached, content_key
from retrain.types import ExpertRow, Observer, Problem

_RECIPE = 2
"""Raised when this module's results change, so that no older cache entry is taken for the new result."""


@dataclass(frozen=True)
class WarmupSettings:
    """Settings of a warm start; the defaults suit `builtin:tiny`.

    Attributes:
        steps: optimizer steps. batch_size: worked solutions in each.
        lr: peak learning rate, reached after warmup_steps, then decayed to 0 by a half cosine.
        dtype: of the matrix products.
        seed: of what is random in the policy's update (dropout); not the run's.
        cache: keep the weights for, or take them from, runs with the same model, problems and settings.
    """

    steps: int = 1000
    batch_size: int = 16
    lr: float = 1.5e-3
    warmup_steps: int = 50
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    cache: bool = True


def warm_start(
    loaded: Loaded,
    problems: Sequence[Problem],
    settings: WarmupSettings,
    observe: Observer,
    *,
    rows: Sequence[ExpertRow] = (),
    ranks: Ranks = ALONE,
) -> bool:
    """Train the loaded model in place to imitate the problems' solutions, in their order, over and over.

    Loss: mean of -log p(token) over the solutions' tokens and the end-of-sequence token after each.

    Args:
        problems: with solutions, at least one. Give a sample that does not depend on the run's seed, so that
            runs with different seeds start from the same weights (and find them in the cache).
        observe: called with `warmup` events: step, steps, loss and seconds left.
        rows: conversations to imitate instead of the problems' solutions, one per problem.
        ranks: rank 0 trains or reads the cache, and the others get its weights.
    Returns:
        Whether the weights came from the cache.
    Raises:
        DataError: a problem has no solution to imitate.
        DivergedError: the loss was not finite.
    """
    used = list(problems[: settings.steps * settings.batch_size])
    dtype: Any = loaded.model.dtype

    def build() -> dict[str, Tensor]:
        return _train(loaded, rows or demonstrations(loaded.chat, used), settings, observe)

    def made() -> tuple[dict[str, Tensor], bool]:
        if not settings.cache:
            return build(), False
        facts = _facts(loaded, used, settings)
        facts |= {"rows": content_key({"rows": [asdict(row) for row in rows]})} if rows else {}
        return cached("warmup", facts, build, waiting=lambda: observe("warmup_waiting", {}))

    weights, hit = ranks.rollouts.on_rank0(made)
    loaded.model.load_state_dict(weights, strict=False)
    loaded.model.tie_weights()
    # Training turned the weights into float32; what comes from the cache must end up the same.
    cast_weights(loaded.model, dtype).eval()
    return hit


def demonstrations(chat: Chat, problems: Sequence[Problem]) -> list[ExpertRow]:
    """Every problem's prompt with its solution, as if it had been sampled; DataError if one has no solution."""
    for problem in problems:
        if problem.solution is None:
            raise DataError(
                f"problem {problem.id!r} has no solution to imitate; give the task solutions, or set [warmup] steps = 0"
            )
    return [chat.conversation(problem) for problem in problems]


def _train(loaded: Loaded, rows: Sequence[ExpertRow], settings: WarmupSettings, observe: Observer) -> dict[str, Tensor]:
    """Run the supervised steps; returns the weights without those that are tied to others."""
    rise, steps = settings.warmup_steps, settings.steps
    shape = PolicySettings(
        lr=settings.lr, warmup_steps=rise, schedule="cosine", total_steps=steps, dtype=settings.dtype
    )
    policy = TorchPolicy(loaded.model, shape)
    layout = Layout(pad_id=0, device=policy.device, max_tokens=0)
    objective = Objective([find("loss", "sft").bind({"weight": 1.0})], find("reduction", "token_mean").bind())
    began = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        for step in range(settings.steps):
            first = step * settings.batch_size
            chosen = [rows[index % len(rows)] for index in range(first, first + settings.batch_size)]
            metrics = policy.update(layout.batch([], step, chosen), objective)
            if metrics.get("update/nonfinite"):
                raise DivergedError(f"the loss of warm-up step {step} is not finite; lower [warmup] lr")
            spent, done = time.perf_counter() - began, step + 1
            left = spent / done * (settings.steps - done)
            loss = metrics.get("loss/sft", float("nan"))
            observe("warmup", {"step": done, "steps": settings.steps, "loss": loss, "left_s": left})
    return {name: value.to("cpu", copy=True) for name, value in distinct(policy.weights()).items()}


def _facts(loaded: Loaded, problems: Sequence[Problem], settings: WarmupSettings) -> dict[str, Any]:
    """Everything that the weights depend on."""
    texts = [[problem.prompt, problem.solution] for problem in problems]
    return {
        "code": [__version__, _RECIPE],
        "architecture": loaded.model.config.to_json_string(use_diff=True),
        "weights": fingerprint(distinct(loaded.model.state_dict())),
        "tokenizer": content_key({"vocabulary": loaded.tokenizer.get_vocab(), "chat": loaded.tokenizer.chat_template}),
        "problems": content_key({"texts": texts}),
        "settings": asdict(replace(settings, cache=True)) | {"chat": loaded.mode},
    }
