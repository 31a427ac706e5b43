"""Data that crosses layers: problems, rollouts and batches.

Importing this module does not import torch; tensors appear in annotations only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

BUILTIN = "builtin:"
"""Prefix of `[model] path` for a model that ships with the package and starts from random weights."""

Metrics = dict[str, float]
"""Flat, `area/name_unit`; reported, never used for control."""

State = dict[str, Any]
"""State of a component: nested dicts of JSON values and tensors. The checkpoint stores it as it is."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable question of a task.

    Attributes:
        id: unique and stable within the task.
        prompt: text, or chat messages `[{"role": ..., "content": ...}]` for a chat template.
        answer: what a reward compares with.
        solution: a worked solution to imitate in warm-up; None if the task has none.
        extra: whatever else the data row held, passed on to rewards.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Every field is explicit: no engine reads a model's own generation_config.

    Attributes:
        group_size: completions per prompt.
        max_tokens: response budget in tokens, end-of-sequence included.
        temperature: 0 is greedy; log-probs are those of the tempered distribution.
        top_p, top_k: 1.0 and 0 switch them off.
        stop_ids: token ids that end a completion (kept as its last token).
        seed: everything random in this call derives from it.
    """

    group_size: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one prompt, once. `logprobs[t]` belongs to `ids[t]`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Outcome of one reward call. `value` is None when it failed: the row is masked, never scored 0.

    Attributes:
        value: weighted sum of the parts; None on failure.
        parts: value of every reward by name.
        correct: the answer is right (first reward with an opinion, value > 0.5); None if it failed.
        status: "ok", "timeout", "crashed", "error" or "invalid".
        detail: a line for the log when status is not "ok".
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    correct: bool | None = None
    status: Literal["ok", "timeout", "crashed", "error", "invalid"] = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with all that is known of it; ragged, JSON-able (`dataclasses.asdict`).

    Attributes:
        problem_id, prompt, answer: of the problem it answers; `prompt` is the rendered text.
        prompt_ids, completion_ids: token ids as the engine saw and sampled them; never re-tokenized.
        sampler_logprobs: one per completion id, at the sampling temperature, as the engine computed it.
        text: decoded completion without special tokens.
        finish_reason: "stop" (a stop id was sampled) or "length".
        weights_version: the optimizer step whose weights sampled it.
        group: index of its group within the step; the group is the prompt's completions.
        reward, parts, correct, status: see `Score`.
    """

    problem_id: str
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    weights_version: int
    group: int
    reward: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    correct: bool | None = None
    status: str = "ok"


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors, right-padded. Column t is the same token in every [N, T] field.

    T counts prompt and response. A row of prompt [7, 8] and completion [9, 2] in a batch with T = 5:

        input_ids      7 8 9 2 0
        attention_mask 1 1 1 1 0
        response_mask  0 0 1 1 0      the policy chose this token
        *_logprobs     0 0 a b 0      log-prob of the token in the same column

    Attributes:
        input_ids: [N, T] int64; attention_mask, response_mask: [N, T] bool.
        sampler_logprobs: [N, T] float32, as the engine computed it; 0 outside response_mask.
        rewards: [N] float32; correct: [N] bool; lengths: [N] int64, response tokens.
        group_ids: [N] int64; is_expert: [N] bool.
        step: the training step, from 0.
        max_tokens: the response budget that sampling had.
        advantages: [N, T] float32, 0 outside response_mask; zeros until credit is assigned.
        extra: columns computed later by signals and the policy, by name (old_logprobs, entropy, ...).
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    sampler_logprobs: Tensor
    rewards: Tensor
    correct: Tensor
    lengths: Tensor
    group_ids: Tensor
    is_expert: Tensor
    advantages: Tensor
    step: int = 0
    max_tokens: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def replace(self, **changes: Any) -> Batch:
        """A new batch with these fields changed; names that are not fields become extra columns."""
        own = {name: value for name, value in changes.items() if name in BASE_COLUMNS}
        extra = {name: value for name, value in changes.items() if name not in BASE_COLUMNS}
        return dataclasses.replace(self, **own, extra={**self.extra, **extra})

    def column(self, name: str) -> Any:
        """The field or extra column of that name; KeyError if there is none yet."""
        return getattr(self, name) if name in BASE_COLUMNS else self.extra[name]

    def rows(self, index: Tensor) -> Batch:
        """The rows `index` [n] (int64) of every column, trimmed to the longest of them."""
        longest = int(self.attention_mask[index].sum(-1).max()) if len(index) else 1
        shape = (int(self.input_ids.shape[0]), int(self.input_ids.shape[1]))

        def pick(value: Any) -> Any:
            return _pick(value, shape, index, max(1, longest))

        fields = {name: pick(getattr(self, name)) for name in BASE_COLUMNS}
        return Batch(**fields, extra={name: pick(value) for name, value in self.extra.items()})


def _pick(value: Any, shape: tuple[int, int], index: Tensor, width: int) -> Any:
    """Rows of a column of a batch of that shape; what is not a column of rows stays as it is."""
    own = tuple(getattr(value, "shape", ()))
    if own == shape:
        return value[index, :width]
    return value[index] if own[:1] == shape[:1] else value


BASE_COLUMNS: frozenset[str] = frozenset(f.name for f in dataclasses.fields(Batch)) - {"extra"}
"""Columns that every batch has from the start."""

POLICY_COLUMNS: frozenset[str] = frozenset({"old_logprobs", "entropy", "varentropy"})
"""Columns that the policy's scoring forward yields, all in one pass."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """LoRA's update of one matrix W [out, in]: up @ down, in float32.

    Attributes:
        up: [out, r], the scale alpha / r included.
        down: [r, in].
        transposed: the state dict holds W as [in, out], as embeddings and GPT-2's layers do.
    """

    up: Tensor
    down: Tensor
    transposed: bool = False

    def added(self, weight: Tensor) -> Tensor:
        """W + up @ down in float32, in the layout of `weight`: what is small beside W is lost in fewer digits."""
        update = self.up @ self.down
        return weight.float() + (update.T if self.transposed else update)


class Adapted(Mapping[str, "Tensor"]):
    """The full state dict of a model with LoRA. An adapted matrix is merged, in float32, when it is read.

    An engine that computes in less than float32 takes the two parts and adds what they compute: a merged matrix
    loses an update that is smaller than the last digit of its weights.

    Attributes:
        base: the frozen weights, in their own precision.
        updates: of the adapted matrices, by their names in `base`.
    """

    def __init__(self, base: Mapping[str, Tensor], updates: Mapping[str, LowRank]) -> None:
        self.base, self.updates = base, updates

    def __getitem__(self, name: str) -> Tensor:
        weight, update = self.base[name], self.updates.get(name)
        return weight if update is None else update.added(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


@dataclass
class TransformContext:
    """What a context-style plug-in `fn(ctx)` receives: one group, as plain lists. `AlgorithmContext` is the same class.

    Attributes:
        episode_advantages: one number per completion (for `algorithm_mode`: the rewards).
        logprobs_G: sampled tokens' log-probs, one list per completion.
        planning_masks_G: 1 on planning tokens, same shape as logprobs_G.
        sepa_lambda: SEPA's pooling weight at this step, in [0, 1].
        params: the `*_params` table of the slot.
        step: training step, from 0.
        gtpo_beta, hicra_alpha: from `[gtpo]` and `[hicra]`.
        rewards, lengths, correct: one per completion; `rewards_G` is `rewards`.
    """

    episode_advantages: list[float]
    logprobs_G: list[list[float]]
    planning_masks_G: list[list[int]]
    sepa_lambda: float = 0.0
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    rewards: list[float] = field(default_factory=list[float])
    lengths: list[int] = field(default_factory=list[int])
    correct: list[bool] = field(default_factory=list[bool])

    @property
    def rewards_G(self) -> list[float]:  # noqa: N802 - named like the other lists of a group
        return self.rewards


@dataclass
class TransformOutput:
    """What a context-style plug-in returns; a plain `token_advs` will do as well. `AlgorithmOutput` is the same class.

    Attributes:
        token_advs: advantages per token, same shape as `logprobs_G`.
        extra_metrics: numbers for metrics.jsonl; averaged over the groups of a step.
        has_stats, stats: part of the contract and not read, since every run measures the entropies of planning and
            execution tokens itself.
    """

    token_advs: list[list[float]]
    extra_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    has_stats: bool = field(default=False, kw_only=True)
    stats: Any = field(default=None, kw_only=True)


AlgorithmContext = TransformContext
AlgorithmOutput = TransformOutput


Observer = Callable[[str, Mapping[str, Any]], None]
"""Told of events as a run goes on: `observe(event, details)`. The display and the log are observers."""
