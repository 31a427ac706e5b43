"""Functions shared by all adapters: episode advantages from plain arrays, and the score of one completion."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from retrain.algorithms.graph.plain_functions import call_lists
from retrain.errors import ComponentError
from retrain.registry import Component, bind, components
from retrain.rewards.pool import RewardPool
from retrain.rewards.signatures import form_of
from retrain.types import Score

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = ("rewards", "correct", "lengths", "turn_ids", "group_ids", "max_tokens")
"""Columns of `Batch` that other trainers can provide to an advantage."""


def compute_advantage(
    rewards: Sequence[float] | Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    group_ids: Sequence[Any] | Tensor | None = None,
    mode: str = "dca",
    *,
    correct: Sequence[bool] | Tensor | None = None,
    max_tokens: int | None = None,
    **params: Any,
) -> Tensor:
    """Compute the episode advantages of completions, with any registered advantage or a dotted path.

    Args:
        rewards: [N] numbers, or booleans (right or wrong).
        lengths: [N] numbers of response tokens; required by modes that use the length.
        group_ids: [N] values that are equal for the completions of one prompt, such as verl's `uid`. None puts all
            completions into one group.
        mode: see `[algorithm] advantage_mode`: "grpo", "grpo_std", "maxrl", "rloo", "grpo_lp", "dca" ...
        correct: [N] booleans; by default reward > 0.5.
        max_tokens: maximum number of response tokens; by default that of the longest completion.
        params: parameters of the mode, with the names of its TOML table: `beta=0.2`.
    Returns:
        [N] in the precision of the rewards (float32 for lists), on their device, without gradient.
    Raises:
        ComponentError: the mode is unknown, a parameter is invalid, or the mode needs a column that is not given.
        ValueError: columns differ in length or are not flat, a value is not finite, or a length is negative.
    """
    values = _column("rewards", rewards)
    # Booleans and integers have no mean.
    values = values if values.is_floating_point() else values.float()
    columns: dict[str, Any] = {"rewards": values, "group_ids": _group_numbers(group_ids, values)}
    columns["correct"] = values > 0.5 if correct is None else _column("correct", correct).to(values.device).bool()
    if lengths is not None:
        columns["lengths"] = _column("lengths", lengths).to(values.device).long()
        _check_none("lengths", columns["lengths"] < 0, "is negative; give the number of response tokens")
        # At least 1, because some advantages divide by it.
        columns["max_tokens"] = max_tokens or int(max([1, *columns["lengths"].tolist()]))
    for name, column in columns.items():
        if name != "max_tokens" and column.shape != (len(values),):
            raise ValueError(
                f"{name} has shape {tuple(column.shape)} for {len(values)} rewards; give one per completion"
            )
    columns["turn_ids"] = columns["group_ids"].new_zeros((len(values), 1))  # every completion is one turn
    return _call(bind("advantage", mode, params), columns)


def portable_advantages() -> list[str]:
    """Registered advantages that need nothing but COLUMNS."""
    return [component.name for component in components("advantage") if set(component.reads) <= set(COLUMNS)]


def score(reward: str, params: Mapping[str, Any], item: Mapping[str, Any]) -> Score:
    """Score one completion in a worker process, which is killed if the reward hangs. The function is thread-safe.

    Args:
        reward: name of a registered reward, or a dotted path.
        params: parameters of the reward.
        item: values of the completion, by the names in `retrain.rewards.signatures.FIELDS`.
    Raises:
        ComponentError: the reward is unknown, or reads a name that is not in `item`.
    """
    # As JSON, because a dict cannot be the key of a cache.
    reads, call = _reward_scorer(reward, json.dumps(dict(params), sort_keys=True))
    if missing := [name for name in reads if name not in item]:
        readable = f"here a reward can read {', '.join(item)}"
        problem = f'reward "{reward}" reads {", ".join(missing)}, which this trainer does not provide'
        raise ComponentError(problem, readable)
    return call(item)


@cache
def _reward_scorer(reward: str, params: str) -> tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Score]]:
    """Return the names that a reward reads, and a function that scores one completion with it.

    Args:
        reward: name or dotted path.
        params: its parameters as JSON.
    """
    bound = bind("reward", reward, json.loads(params))
    lock = Lock()  # trainers score in several threads, and the pool serves one call at a time
    # max_failed = 1: the caller sees each failure in its score and decides itself.
    pool = RewardPool([(bound, 1.0)], max_failed=1.0)
    atexit.register(pool.close)

    def call(item: Mapping[str, Any]) -> Score:
        with lock:
            return pool.score([item])[0]

    return form_of(bound).reads, call


def _call(bound: Component, columns: Mapping[str, Any]) -> Tensor:
    if bound.contract == "lists":
        # A plain function of a list is called once per group.
        return call_lists(bound, columns)
    if missing := [name for name in bound.reads if name not in columns]:
        raise ComponentError(
            f'advantage "{bound.name}" reads {", ".join(missing)}, which was not given',
            f"it is called with: {', '.join(columns)}",
        )
    result = bound(*(columns[name] for name in bound.reads))
    # Some advantages also return metrics, for which other trainers have no place here.
    return (result[0] if isinstance(result, tuple) else result).to(columns["rewards"].dtype)


def _column(name: str, values: Sequence[Any] | Tensor) -> Tensor:
    """Convert a column to a tensor [N], on the device of the values. Raise ValueError if it is not flat and finite."""
    import torch

    try:
        column = torch.as_tensor(values).detach()
    except (TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} are not numbers ({error}); give one number per completion") from None
    if column.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(column.shape)}; give one number per completion, in a flat list")
    _check_none(name, ~column.isfinite(), "is not finite; leave the completion out or give it a number")
    return column


def _check_none(name: str, wrong: Tensor, problem: str) -> None:
    """Raise ValueError with the index of the first completion for which `wrong` [N] is True."""
    if wrong.any():
        raise ValueError(f"{name}[{int(wrong.nonzero()[0])}], of the completion with this index, {problem}")


def _group_numbers(group_ids: Sequence[Any] | Tensor | None, rewards: Tensor) -> Tensor:
    """Convert ids of any hashable type to integers from 0, in the order of their first occurrence.

    Args:
        group_ids: [N] ids; None stands for a single group.
        rewards: [N] rewards, whose device the result has.
    """
    import torch

    if group_ids is None:
        return torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
    # As Python values: verl's ids are texts in a numpy array.
    listed: list[Any] = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)  # pyright: ignore[reportAttributeAccessIssue]
    if nested := [index for index, group in enumerate(listed) if isinstance(group, list | dict | set)]:
        raise ValueError(f"group_ids[{nested[0]}] is not a single id; give one per completion, in a flat list")
    # In order of appearance, so that equal inputs give equal numbers.
    numbers = {group: number for number, group in enumerate(dict.fromkeys(listed))}
    return torch.tensor([numbers[group] for group in listed], dtype=torch.long, device=rewards.device)
