"""Data that crosses layers: problems, rollouts and batches.

Importing this module does not import torch; tensors appear in annotations only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT32_MAX = 3.4028234663852886e38

Metrics = dict[str, float]
"""Flat, `area/name_unit`; reported, never used for control."""

State = dict[str, Any]
"""State of a component: nested dicts of JSON values and tensors. The checkpoint stores it as it is."""


def fits_float32(value: float) -> bool:
    """Return whether a number is finite in float32, the dtype of rewards and advantages; False for NaN."""
    return abs(value) <= _FLOAT32_MAX


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable question of a task.

    Attributes:
        id: unique and stable within the task.
        prompt: text, or chat messages `[{"role": ..., "content": ...}]` for a chat template.
        answer: the reference answer that rewards compare with.
        solution: a worked solution to imitate in warm-up; None if the task has none.
        extra: all columns of the data row except the prompt, unchanged, for rewards.
        replies: the model's turns of an episode to imitate in warm-up, for tasks with an environment.
        environment: label of the entry of `[[environments]]` that this problem is played in.
        place: `file:line` of its row, for messages; "" if it comes from no file.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replies: tuple[str, ...] = ()
    environment: str = ""
    place: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Fields that rewards and environments receive."""
        facts = {"id": self.id, "prompt": self.prompt, "answer": self.answer, "extra": self.extra}
        return facts | ({"environment": self.environment} if self.environment else {})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Every field is explicit: no engine reads a model's own generation_config.

    Attributes:
        temperature: 0 is greedy; log-probs are those of the tempered distribution.
        top_p, top_k: 1.0 and 0 disable them.
        stop_ids: token ids that end a completion (kept as its last token).
        seed: with a request's stream, determines its random numbers.
        continued: later requests will extend these contexts, as the turns of an episode do, so an engine may keep its
            keys and values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an engine: completions of one context.

    Attributes:
        ids: token ids of the context.
        count: number of completions.
        max_tokens: limit of each completion, end-of-sequence token included.
        stream: selects the random numbers; the completions do not depend on the other requests of a call.
        session: number that requests share whose contexts extend each other, such as the turns of a group's episodes;
            an engine with several servers sends them to one. None: the request stands alone.
    """

    ids: tuple[int, ...]
    count: int
    max_tokens: int
    stream: int
    session: int | None = None


class Prefix(NamedTuple):
    """Context that a completion is continued from.

    Attributes:
        group: index of the group whose prompt `ids` begins with.
        ids: token ids of the prompt and the response so far.
        sampled: length of the response so far, in tokens.
    """

    group: int
    ids: tuple[int, ...]
    sampled: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion. `logprobs[t]` is the log-prob of `ids[t]` under the sampling distribution."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one reward call. On failure `value` is None, and the rollout is masked instead of scored 0.

    Attributes:
        value: weighted sum of the parts; None on failure.
        parts: value of every reward by name.
        correct: the first reward that returned a value gave more than 0.5; None on failure.
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
    """One turn of the policy: tokens `start` to `end` (exclusive), counted after the prompt.

    Attributes:
        finish_reason: "stop" (the last token is a stop id) or "length".
        weights_version: optimizer step of the weights that sampled it.
        reward: the environment's reward for this turn, without the final reward of the episode.
        state: key of the environment's state before the turn; "" if unknown.
    """

    start: int
    end: int
    finish_reason: Literal["stop", "length"]
    weights_version: int
    reward: float = 0.0
    state: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode: a prompt, the policy's turns and the observations between them, without padding.

    Attributes:
        problem_id, prompt, answer: of the problem it answers; `prompt` is the rendered text.
        prompt_ids: token ids of the prompt as the engine saw them.
        completion_ids: all tokens after the prompt, sampled or not; never re-tokenized.
        sampler_logprobs: one per completion id, at the sampling temperature, as the engine computed it; 0 for a
            token that was not sampled.
        text: decoded completion without special tokens.
        turns: which of the completion ids were sampled, in order; at least one.
        group: index of its group within the step; a group is all rollouts of one prompt.
        reward, parts, correct, status: see `Score`.
        ended: what ended an episode in an environment: "done" (the environment), a limit ("turns", "tokens" or
            "context"), or a failure ("error" or "timeout"); empty without an environment.
        metrics: numbers that the environment reported for the episode.
        environment: label of the problem's environment.
        greedy: reward of the prompt's greedy completion, if the run samples one.
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
    greedy: float | None = None

    @property
    def truncated(self) -> bool:
        """True if a token limit ended it."""
        return self.ended in ("tokens", "context") if self.ended else self.finish_reason == "length"

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Finish reason of the last turn."""
        return self.turns[-1].finish_reason

    @property
    def weights_version(self) -> int:
        """Version of the oldest weights that sampled a turn."""
        return min(turn.weights_version for turn in self.turns)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first, end) of the sampled tokens of every turn, end exclusive, counted from the start of the prompt."""
        return [(len(self.prompt_ids) + turn.start, len(self.prompt_ids) + turn.end) for turn in self.turns]

    def rewarded(self, value: float, parts: Mapping[str, float | None], correct: bool | None = None) -> Rollout:
        """Return a copy whose reward is this final value plus the rewards of its turns; correct if it exceeds 0.5.

        If an environment names its parts, the first part decides correctness, without the rewards of the turns.
        """
        given = sum(turn.reward for turn in self.turns)
        if correct is None:
            correct = (value + given if "env" in parts else next(iter(parts.values())) or 0.0) > 0.5
        parts = {**parts, "turns": given} if given else dict(parts)
        return dataclasses.replace(self, reward=value + given, parts=parts, correct=correct)

    def row(self) -> dict[str, Any]:
        """Convert to a JSON row."""
        last = {"finish_reason": self.finish_reason, "weights_version": self.weights_version}
        return dataclasses.asdict(self) | last

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rollout:
        """Read a row that `row` wrote. A row without turns, from an earlier version, becomes one turn."""
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
        spans: (first, end) of every answer to imitate, end exclusive, in order.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens before the first answer to imitate."""
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
        max_tokens: limit of response tokens in sampling.
        advantages: [N, T] float32, 0 outside response_mask; zeros until credit is assigned.
        turn_ids: [N, T] int64, index of the turn that sampled the token, from 0; 0 for tokens that were not sampled.
        turn_rewards: [N, T] float32, reward of each turn at its last token; a row sums to its reward. Default: a row
            is one turn with the whole reward.
        anchor_ids: [N, T] int64, an id for each pair of group and environment state before the turn; -1 if the state
            is unknown, and outside turns.
        greedy_rewards: [N] float32, reward of the prompt's greedy completion, repeated on its rows; NaN without one.
        reward_parts: [N, R] float32, unweighted value of each entry of `[[rewards]]`, or of each part of its score
            if it has such (trait `parts`); NaN without a value, and on expert rows. Default: the reward is the only
            part.
        reward_weights: weights of the R parts.
        problems: problem and rendered prompt of every group; empty if the batch was not sampled by a run.
        extra: columns that signals and the policy compute later, by name (old_logprobs, entropy, ...).
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
    anchor_ids: Tensor = None  # pyright: ignore[reportAssignmentType]
    greedy_rewards: Tensor = None  # pyright: ignore[reportAssignmentType]
    reward_parts: Tensor = None  # pyright: ignore[reportAssignmentType]
    reward_weights: tuple[float, ...] = (1.0,)
    problems: Mapping[int, Any] = field(default_factory=dict[int, Any])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if cast("Any", self.turn_ids) is None:
            remaining = self.response_mask.flip(-1).cumsum(-1).flip(-1)
            last = self.response_mask & (remaining == 1)
            object.__setattr__(self, "turn_ids", remaining * 0)
            object.__setattr__(self, "turn_rewards", self.rewards[:, None].where(last, 0.0))
        if cast("Any", self.anchor_ids) is None:
            object.__setattr__(self, "anchor_ids", self.response_mask.long() * 0 - 1)
        if cast("Any", self.greedy_rewards) is None:
            object.__setattr__(self, "greedy_rewards", self.rewards.new_full(self.rewards.shape, math.nan))
        if cast("Any", self.reward_parts) is None:
            parts = self.rewards.masked_fill(self.is_expert, math.nan)
            object.__setattr__(self, "reward_parts", parts[:, None])

    def replace(self, **changes: Any) -> Batch:
        """Return a copy with these fields changed; names that are not fields become extra columns."""
        own = {name: value for name, value in changes.items() if name in BASE_COLUMNS}
        extra = {name: value for name, value in changes.items() if name not in BASE_COLUMNS}
        return dataclasses.replace(self, **own, extra={**self.extra, **extra})

    def column(self, name: str) -> Any:
        """Return a field or extra column by name; KeyError if it has not been computed."""
        return getattr(self, name) if name in BASE_COLUMNS else self.extra[name]

    def filled(self, parts: Sequence[Batch]) -> Batch:
        """Return a copy with the columns of `parts`, whose rows are its first rows; 0 in the other rows."""
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
        """Select the rows `index` [n] (int64) of every column, trimmed to the longest of them."""
        longest = max(1, int(self.attention_mask[index].sum(-1).max())) if len(index) else 1
        shape = self.input_ids.shape

        def pick(value: Any) -> Any:
            own = getattr(value, "shape", ())
            if own == shape:
                return value[index, :longest]
            return value[index] if own[:1] == shape[:1] else value  # values without a row dimension are unchanged

        fields = {name: pick(getattr(self, name)) for name in BASE_COLUMNS - {"reward_parts"}}
        fields["reward_parts"] = self.reward_parts[index]  # its second dimension is rewards, not tokens
        return Batch(**fields, extra={name: pick(value) for name, value in self.extra.items()})


BASE_COLUMNS: frozenset[str] = frozenset(f.name for f in dataclasses.fields(Batch)) - {"extra"}
"""Columns that every batch has."""

POLICY_COLUMNS: frozenset[str] = frozenset({"old_logprobs", "entropy", "varentropy", "sum_pi_squared"})
"""Columns that one scoring forward of the policy computes."""


Observer = Callable[[str, Mapping[str, Any]], None]
"""Called with the events of a run: `observe(event, details)`. The display and the log are observers."""

Continue = Callable[[Mapping[int, Any], Sequence[Prefix], int, int], "tuple[Tensor, int]"]
"""(problems, prefixes, continuations of each, seed) -> (rewards [prefixes, continuations], NaN where scoring failed;
number of sampled tokens). A component's constructor may take it as `continue_from`."""
