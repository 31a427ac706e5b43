"""Data types that several layers share: problems, rollouts and batches.

Importing this module does not import torch, because tensors occur only in annotations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

# Written out, because this module does not import torch.
_FLOAT32_MAX = 3.4028234663852886e38
# Its square is 1e30, so float32 holds the sum over a hundred million rows.
_LARGEST_REWARD = 1e15
REWARD_RANGE = "from -1e15 to 1e15"
"""Range of `is_reward`, as text for messages."""

Metrics = dict[str, float]
"""Metrics by name, `area/name_unit`. They are reported, and never used for control."""

State = dict[str, Any]
"""State of a component: nested dicts of JSON values and tensors. The checkpoint stores it as it is."""


def fits_float32(value: float) -> bool:
    """Return whether a number is finite in float32, the dtype of rewards and advantages; False for NaN."""
    return abs(value) <= _FLOAT32_MAX


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: finite, and not so large that sums of its squares overflow float32."""
    # False for NaN, too: it compares as false with every number.
    return abs(value) <= _LARGEST_REWARD


@dataclass(frozen=True, slots=True)
class Problem:
    """A verifiable problem of a task.

    Attributes:
        id: unique and stable within the task.
        prompt: text, or chat messages `[{"role": ..., "content": ...}]` for a chat template.
        answer: the reference answer, to which rewards compare completions.
        solution: a worked solution to imitate in the warm start; None if the task has none.
        extra: all columns of the data row except the prompt, unchanged, for rewards.
        replies: the model's turns of an episode to imitate in warm-up, for tasks with an environment.
        environment: label of the entry of `[[environments]]` that this problem is played in.
        place: `file:line` of its row, for messages; "" if it comes from no file.
        template: variables of the chat template for this prompt, such as `tools`.
    """

    id: str
    prompt: str | list[dict[str, str]]
    answer: str
    solution: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replies: tuple[str, ...] = ()
    environment: str = ""
    place: str = ""
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def facts(self) -> dict[str, Any]:
        """Fields that rewards and environments receive."""
        facts = {"id": self.id, "prompt": self.prompt, "answer": self.answer, "extra": self.extra}
        return facts | ({"environment": self.environment} if self.environment else {})


def messages_of(prompt: str | list[dict[str, str]]) -> list[dict[str, str]]:
    """Return a prompt as chat messages; a text is a single message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Every field is explicit: no engine reads a model's own generation_config.

    Attributes:
        temperature: 0 is greedy decoding. Otherwise log-probs are those of the distribution at this temperature.
        top_p: probability mass of the tokens to sample from; 1.0 disables the limit.
        top_k: number of most likely tokens to sample from; 0 disables the limit.
        stop_ids: token ids that end a completion (kept as its last token).
        seed: determines the random numbers of a request, together with its stream.
        continued: later requests will extend these contexts, like the turns of an episode, so an engine may keep the
            keys and values of its KV cache.
        vocabulary: number of token ids of the model.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    continued: bool = False
    vocabulary: int = 1 << 31  # more ids than any model has


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an engine for completions of one context.

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
    """Prompt and beginning of a response, from which completions are continued.

    Attributes:
        group: index of the prompt's group.
        ids: token ids of the prompt and of the response so far.
        sampled: number of tokens of the response so far.
    """

    group: int
    ids: tuple[int, ...]
    sampled: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled completion.

    Attributes:
        ids: token ids.
        logprobs: log-prob of each token under the sampling distribution.
        finish_reason: "stop" (the last token is a stop id) or "length".
        weights_version: optimizer step of the weights that sampled it, of the oldest if there were several.
        versions: the optimizer step of every token; empty if all have the same.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weights_version: int = 0
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a completion by all rewards. On failure `value` is None, and the rollout is masked instead of scored 0.

    Attributes:
        value: weighted sum of the rewards; None on failure.
        parts: name of each reward -> its value.
        correct: True if the first reward that measures correctness exceeds 0.5; if no reward measures it, the first
            of all rewards counts. Rewards that returned None are passed over; False if all that measure it returned
            None. None on failure.
        status: "ok", "timeout", "crashed", "error" or "invalid".
        detail: description of the failure if status is not "ok".
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    correct: bool | None = None
    status: Literal["ok", "timeout", "crashed", "error", "invalid"] = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy in an episode.

    Attributes:
        start: index of its first token, counted from the end of the prompt.
        end: index after its last token.
        finish_reason: "stop" (the last token is a stop id) or "length".
        weights_version: optimizer step of the weights that sampled it, of the oldest if there were several.
        reward: the environment's reward for this turn, without the final reward of the episode.
        state: key of the environment's state before the turn; "" if unknown.
        versions: the optimizer step of every token; empty if all have the same.
    """

    start: int
    end: int
    finish_reason: Literal["stop", "length"]
    weights_version: int
    reward: float = 0.0
    state: str = ""
    versions: tuple[int, ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The optimizer step of the weights that sampled each token."""
        return self.versions or (self.weights_version,) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Rollout:
    """An episode: a prompt, the policy's turns and the observations between them, without padding.

    Attributes:
        problem_id: id of the problem.
        prompt: the rendered prompt of the problem, as text.
        answer: the reference answer of the problem.
        prompt_ids: token ids of the prompt as the engine received them.
        completion_ids: all tokens after the prompt, sampled or not; never re-tokenized.
        sampler_logprobs: log-prob of each completion id at the sampling temperature, as the engine computed it; 0 for
            a token that was not sampled.
        text: decoded completion without special tokens.
        turns: spans of the sampled completion ids, in order; at least one.
        group: index of its group within the step; a group consists of all rollouts of one prompt.
        reward: `value` of the score; see `Score`.
        parts: see `Score`.
        correct: see `Score`.
        status: see `Score`.
        ended: reason why an episode in an environment ended: "done" (the environment), a limit ("turns", "tokens" or
            "context"), or a failure ("error" or "timeout"); "" without an environment.
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
        """True if a token limit ended the episode."""
        # A turn of an episode may be cut off at its own limit and the episode still go on.
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
        """Version of the oldest weights that sampled one of the turns."""
        return min(turn.weights_version for turn in self.turns)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of the sampled tokens of every turn, end exclusive, counted from the start of the prompt."""
        return [(len(self.prompt_ids) + turn.start, len(self.prompt_ids) + turn.end) for turn in self.turns]

    def rewarded(self, value: float, parts: Mapping[str, float | None], correct: bool | None = None) -> Rollout:
        """Return a copy whose reward is a final value plus the rewards of its turns.

        Args:
            value: the final value.
            parts: values of the parts of the reward, by name.
            correct: True if the rollout is correct. By default, it is correct if the reward is above 0.5. If the
                environment returned parts with names, the first part counts instead of the reward.
        """
        of_turns = sum(turn.reward for turn in self.turns)
        if correct is None:
            # An environment's single reward has the part "env"; it may come in turns, so the whole of it counts.
            judged = value + of_turns if "env" in parts else next(iter(parts.values()))
            correct = (judged or 0.0) > 0.5
        parts = {**parts, "turns": of_turns} if of_turns else dict(parts)
        return dataclasses.replace(self, reward=value + of_turns, parts=parts, correct=correct)

    def row(self) -> dict[str, Any]:
        """Convert to a JSON row."""
        # Properties are not fields, and readers of the file need them.
        last = {"finish_reason": self.finish_reason, "weights_version": self.weights_version}
        row: dict[str, Any] = dataclasses.asdict(self) | last
        for turn in row["turns"]:
            if not turn["versions"]:  # the weights changed only between steps
                del turn["versions"]
        return row

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rollout:
        """Restore a rollout from the result of `row`."""
        # Rows of earlier versions lack newer fields, which have defaults.
        fields: dict[str, Any] = {f.name: row[f.name] for f in dataclasses.fields(cls) if f.name in row}
        # JSON has lists, and the fields are tuples, which are hashable.
        for name in ("prompt_ids", "completion_ids", "sampler_logprobs"):
            fields[name] = tuple(row[name])
        turns: Any = [turn | {"versions": tuple(turn.get("versions", ()))} for turn in row["turns"]]
        fields["turns"] = tuple(Turn(**turn) for turn in turns)
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """A conversation to imitate.

    Attributes:
        ids: token ids; every answer ends with the end-of-sequence token.
        spans: (start, end) of every answer to imitate, end exclusive, in order.
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
        input_ids: [N, T] int64, token ids.
        attention_mask: [N, T] bool, false for padding.
        response_mask: [N, T] bool, true for tokens that the policy sampled (all false for truncated rollouts that the
            run masks), and on expert rows for tokens to imitate.
        sampler_logprobs: [N, T] float32, as the engine computed them; 0 outside response_mask.
        rewards: [N] float32.
        correct: [N] bool.
        lengths: [N] int64, number of response tokens.
        group_ids: [N] int64, id of the row's group.
        is_expert: [N] bool, true for demonstrations.
        step: index of the training step, from 0.
        max_tokens: maximum number of response tokens in sampling.
        advantages: [N, T] float32, 0 outside response_mask; zeros until they are computed.
        turn_ids: [N, T] int64, index of the turn that sampled the token, from 0; 0 for tokens that were not sampled.
        turn_rewards: [N, T] float32, reward of each turn at its last token; the sum of a row is its reward. By default
            a row is one turn with the whole reward.
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
            # Operations on existing tensors give the device and need no import of torch.
            remaining = self.response_mask.flip(-1).cumsum(-1).flip(-1)
            last = self.response_mask & (remaining == 1)
            # The class is frozen, so only `object` can still set its fields.
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
        """Return a copy with fields replaced; names that are not fields become extra columns."""
        fields = {name: value for name, value in changes.items() if name in BASE_COLUMNS}
        extra = {name: value for name, value in changes.items() if name not in BASE_COLUMNS}
        return dataclasses.replace(self, **fields, extra={**self.extra, **extra})

    def column(self, name: str) -> Any:
        """Return a field or extra column by name; KeyError if it has not been computed."""
        return getattr(self, name) if name in BASE_COLUMNS else self.extra[name]

    def rows(self, index: Tensor) -> Batch:
        """Return a batch of the rows `index` [n] (int64), with padding removed that none of them needs."""
        # At least one column: models and reductions do not accept tensors of width 0.
        longest = max(1, int(self.attention_mask[index].sum(-1).max())) if len(index) else 1
        shape = self.input_ids.shape

        def pick(value: Any) -> Any:
            # Columns may also be numbers and dicts, which belong to the whole batch.
            value_shape = getattr(value, "shape", ())
            if value_shape == shape:
                return value[index, :longest]
            has_rows = value_shape[:1] == shape[:1]
            return value[index] if has_rows else value

        fields = {name: pick(getattr(self, name)) for name in BASE_COLUMNS - {"reward_parts"}}
        fields["reward_parts"] = self.reward_parts[index]  # its second dimension is rewards, not tokens
        return Batch(**fields, extra={name: pick(value) for name, value in self.extra.items()})


BASE_COLUMNS: frozenset[str] = frozenset(f.name for f in dataclasses.fields(Batch)) - {"extra"}
"""Columns that every batch has."""

POLICY_COLUMNS: frozenset[str] = frozenset({"old_logprobs", "entropy", "varentropy", "sum_pi_squared"})
"""Columns that one forward pass of the policy computes."""


Observer = Callable[[str, Mapping[str, Any]], None]
"""Function called for every event of a run: `observe(event, details)`. The display and the log are observers."""

Continue = Callable[[Mapping[int, Any], Sequence[Prefix], int, int], "tuple[Tensor, int]"]
"""Function that samples continuations: (problems, prefixes, number of continuations of each, seed) -> (rewards
[prefixes, continuations], NaN where scoring failed; number of sampled tokens). The constructor of a component can take
it as `continue_from`."""
