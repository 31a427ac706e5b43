"""A conversation as token ids, with the positions of what the model sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from retrain.training.chat import TokenizedPrompt
from retrain.types import Completion, Turn


@dataclass(eq=False)
class Transcript:
    """A conversation as tokens. Sampled tokens are kept as they are and never tokenized again.

    Attributes:
        prompt: the tokens before the first turn.
        ids, logprobs: one entry for each token after the prompt; the log-prob of a token that was not sampled is 0.
        turns: positions of the sampled tokens in `ids`, with their finish reasons.
    """

    prompt: TokenizedPrompt
    ids: list[int] = field(default_factory=list[int], kw_only=True)
    logprobs: list[float] = field(default_factory=list[float], kw_only=True)
    turns: list[Turn] = field(default_factory=list[Turn], kw_only=True)

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the whole conversation, prompt included."""
        return (*self.prompt.ids, *self.ids)

    @property
    def end(self) -> int | None:
        """The token that ended the last turn; None if the token limit cut the turn."""
        return self.ids[-1] if self.turns[-1].finish_reason == "stop" else None

    def add_turn(self, completion: Completion, state: str = "") -> None:
        """Append a sampled turn; `state` is the key of the environment's state before it, "" if unknown."""
        start = len(self.ids)
        self.ids += completion.ids
        self.logprobs += completion.logprobs
        origin = completion.finish_reason, completion.weights_version
        self.turns.append(Turn(start, len(self.ids), *origin, state=state, versions=completion.versions))

    def observe(self, ids: Sequence[int]) -> None:
        """Append the tokens of an observation."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
