"""Data that crosses layers: problems, rollouts and batches.

Importing this module does not import torch; tensors appear in annotations only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT32_MAX = 3.4028234663852886e38

Metrics = dict[str, float]
"""Flat, `area/name_unit`; reported, never used for control."""

State = dict[str, Any]
"""State of a component: nested dicts of JSON values and tensors. The checkpoint stores it as it is."""


def fits_float32(value: float) -> bool:
    """Whether a number is finite in float32, in which rewards and advantages are trained on; False of NaN."""
    return abs(value) <= _FLOAT32_MAX


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable question of a task.

    Attributes:
        id: unique and stable within the task.
        prompt: text, or chat messages `[{"role": ..., "content": ...}]` for a chat template.
        answer: what a reward compares with.
        solution: a worked solution to imitate in warm-up; None if the task has none.
        extra: the columns of the data's row but the prompt, as they are, for rewards.
        replies: of an episode to imitate in warm-up, where an environment answers the model.
        environment: the label of the one of `[[environments]]` that answers the model.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replies: tuple[str, ...] = ()
    environment: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """What rewards and environments read of it."""
        facts = {"id": self.id, "prompt": self.prompt, "answer": self.answer, "extra": self.extra}
        return facts | ({"environment": self.environment} if self.environment else {})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Every field is explicit: no engine reads a model's own generation_config.

    Attributes:
        temperature: 0 is greedy; log-probs are those of the tempered distribution.
        top_p, top_k: 1.0 and 0 switch them off.
        stop_ids: token ids that end a completion (kept as its last token).
        seed: with a request's stream, all that its random numbers derive from.
        continued: later requests of this sampling extend what these sample, as the turns of an episode do: an engine
            may keep what it computed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked for: completions of one context.

    Attributes:
        ids: token ids of the context.
        count: how many completions.
        max_tokens: budget of each, end-of-sequence included.
        stream: names the random numbers; what is drawn does not depend on the other requests of a call.
    """

    ids: tuple[int, ...]
    count: int
    max_tokens: int
    stream: int


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
class Turn:
    """What the policy sampled in one piece: tokens `start` to `end` of those after the prompt.

    Attributes:
        finish_reason: "stop" (the last token is a stop id) or "length".
        weights_version: the optimizer step whose weights sampled it.
        reward: what an environment gave for it, apart from what it returned at the end.
    """

    start: int
    end: int
    finish_reason: Literal["stop", "length"]
    weights_version: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """An episode: a prompt, the policy's turns, and what an environment said in between. Ragged; `row` is its JSON.

    Attributes:
        problem_id, prompt, answer: of the problem it answers; `prompt` is the rendered text.
        prompt_ids: token ids of the prompt as the engine saw them.
        completion_ids: all tokens after the prompt, sampled or not; never re-tokenized.
        sampler_logprobs: one per completion id, at the sampling temperature, as the engine computed it; 0 for a
            token that was not sampled.
        text: decoded completion without special tokens.
        turns: which of the completion ids were sampled, in order; at least one.
        group: index of its group within the step; the group is the prompt's rollouts.
        reward, parts, correct, status: see `Score`.
        ended: what ended an episode in an environment: "done" (the environment), a limit ("turns", "tokens" or
            "context"), or a failure ("error" or "timeout"); empty without an environment.
        metrics: what the environment counted in the episode.
        environment: of the problem it answers.
    """

    problem_id: str
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    text: str
    turns: tuple[Turn, ...]
    group: int
    reward: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    correct: bool | None = None
    status: str = "ok"
    ended: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    environment: str = ""

    @property
    def truncated(self) -> bool:
        """It ended for want of tokens."""
        return self.ended in ("tokens", "context") if self.ended else self.finish_reason == "length"

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """How the last turn ended."""
        return self.turns[-1].finish_reason

    @property
    def weights_version(self) -> int:
        """The oldest weights that sampled a turn."""
        return min(turn.weights_version for turn in self.turns)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, behind the last) sampled token of every turn, counted from the start of the prompt."""
        return [(len(self.prompt_ids) + turn.start, len(self.prompt_ids) + turn.end) for turn in self.turns]

    def rewarded(self, value: float, parts: Mapping[str, float | None], correct: bool | None = None) -> Rollout:
        """It with its turns' rewards and this value at its end; by default it is correct above 0.5.

        Where an environment names its parts, the first of them decides what is correct, without the turns' rewards.
        """
        given = sum(turn.reward for turn in self.turns)
        if correct is None:
            correct = (value + given if "env" in parts else next(iter(parts.values())) or 0.0) > 0.5
        parts = {**parts, "turns": given} if given else dict(parts)
        return dataclasses.replace(self, reward=value + given, parts=parts, correct=correct)

    def row(self) -> dict[str, Any]:
        """The rollout as a JSON row."""
        last = {"finish_reason": self.finish_reason, "weights_version": self.weights_version}
        return dataclasses.asdict(self) | last

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rollout:
        """What `row` gave. A row without turns, of an earlier version of this package, is one turn."""
        fields: dict[str, Any] = {f.name: row[f.name] for f in dataclasses.fields(cls) if f.name in row}
        for name in ("prompt_ids", "completion_ids", "sampler_logprobs"):
            fields[name] = tuple(row[name])
        whole = Turn(0, len(row["completion_ids"]), row["finish_reason"], row["weights_version"])
        fields["turns"] = tuple(Turn(**turn) for turn in row.get("turns", ())) or (whole,)
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """A conversation to imitate.

    Attributes:
        ids: token ids, the last token of every answer being the end of sequence.
        spans: (first, behind the last) token of every answer to imitate, in order.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """What comes before the first answer to imitate."""
        return self.ids[: self.spans[0][0]]


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
        turn_ids: [N, T] int64, which of the row's turns sampled the token, from 0; 0 where none did.
        turn_rewards: [N, T] float32, on the last token of each turn what the turn earned; a row's sum is its reward.
            Unset, a row is one turn, which earned all of the reward.
        problems: the problem and the rendered prompt of every group; empty where no run has sampled the batch.
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
    turn_ids: Tensor = None  # pyright: ignore[reportAssignmentType] - __post_init__ fills them in
    turn_rewards: Tensor = None  # pyright: ignore[reportAssignmentType]
    problems: Mapping[int, Any] = field(default_factory=dict[int, Any])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if cast("Any", self.turn_ids) is None:
            later = self.response_mask.flip(-1).cumsum(-1).flip(-1)
            last = self.response_mask & (later == 1)
            object.__setattr__(self, "turn_ids", later * 0)
            object.__setattr__(self, "turn_rewards", self.rewards[:, None].where(last, 0.0))

    def replace(self, **changes: Any) -> Batch:
        """A new batch with these fields changed; names that are not fields become extra columns."""
        own = {name: value for name, value in changes.items() if name in BASE_COLUMNS}
        extra = {name: value for name, value in changes.items() if name not in BASE_COLUMNS}
        return dataclasses.replace(self, **own, extra={**self.extra, **extra})

    def column(self, name: str) -> Any:
        """The field or extra column of that name; KeyError if it has not been computed."""
        return getattr(self, name) if name in BASE_COLUMNS else self.extra[name]

    def filled(self, parts: Sequence[Batch]) -> Batch:
        """This batch with the columns of `parts`, whose rows one after the other are its first rows; 0 elsewhere."""
        columns: dict[str, Any] = {}
        for name, value in {**parts[-1].extra, "advantages": self.advantages}.items():
            if (dims := len(getattr(value, "shape", ()))) == 0:
                columns[name] = value
                continue
            columns[name] = full = value.new_zeros(self.input_ids.shape[:dims])
            first = 0
            for part in (one.column(name) for one in parts):
                full[(slice(first, first + len(part)), *map(slice, part.shape[1:]))] = part
                first += len(part)
        return self.replace(**columns)

    def rows(self, index: Tensor) -> Batch:
        """The rows `index` [n] (int64) of every column, trimmed to the longest of them."""
        longest = max(1, int(self.attention_mask[index].sum(-1).max())) if len(index) else 1
        shape = self.input_ids.shape

        def pick(value: Any) -> Any:
            own = getattr(value, "shape", ())
            if own == shape:
                return value[index, :longest]
            return value[index] if own[:1] == shape[:1] else value  # what is not a column of rows stays as it is

        fields = {name: pick(getattr(self, name)) for name in BASE_COLUMNS}
        return Batch(**fields, extra={name: pick(value) for name, value in self.extra.items()})


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
        """W + up @ down in float32, in the layout of `weight`: bfloat16 would lose an update much smaller than W."""
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

    def __contains__(self, name: object) -> bool:
        return name in self.base

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


Observer = Callable[[str, Mapping[str, Any]], None]
"""Called with the events of a run: `observe(event, details)`. The display and the log are observers."""


Ask = Callable[[bool], Sequence[Request] | None]
"""Requests to sample next; told whether the engine is idle, when it waits for some. None: no more."""
Hear = Callable[[Request, Sequence[Completion]], None]
"""Takes the completions of a request."""
