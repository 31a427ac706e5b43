"""Fields of requests in the OpenAI format, and the size of a context that a model can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from retrain.run.run_context import RunContext
from retrain.serve.chat_sessions import ChatMessage
from retrain.serve.http_app import JsonObject, RefusedError, too_long
from retrain.system.model_paths import positions

_OVERHEAD = 1 << 20
"""Bytes allowed in a request besides its text."""
_LONGEST = 1 << 25
"""Upper bound on the bytes of a request's text for any model."""

_NO_EFFECT: dict[str, object] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "auto",
    "top_logprobs": 0,
}
"""Fields that are not supported -> the value with which they have no effect, so that it is accepted."""

_T = TypeVar("_T", bound="RequestFields")
_Count = Annotated[int, Field(ge=1)]


class RequestFields(BaseModel):
    """Fields of a request. Those that are null, or have no effect, are left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _present(cls, body: JsonObject) -> JsonObject:
        return {
            name: value
            for name, value in body.items()
            # Clients send fields at their defaults; only a value that would change the answer is refused.
            if value is not None and (name not in _NO_EFFECT or value != _NO_EFFECT[name])
        }


class ChatMessages(RequestFields):
    """Messages, and the largest number of tokens of the reply."""

    messages: list[Any]
    tools: list[Any] = []
    max_completion_tokens: _Count | None = None
    max_tokens: _Count | None = None

    @property
    def limit(self) -> int | None:
        """Largest number of tokens that the client asked for."""
        return self.max_completion_tokens or self.max_tokens


class TurnFields(ChatMessages):
    """Fields that a run in training reads; it ignores others, because sampling settings are those of the run."""

    model_config = ConfigDict(extra="ignore")

    n: Literal[1] = 1
    stream: Literal[False] = False


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class SampledFields(RequestFields):
    """Fields of chat and text completions."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] = ""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: _Count | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a completion."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop))


class ChatFields(SampledFields, ChatMessages):
    """Fields of `/v1/chat/completions`."""

    logprobs: bool = False
    metadata: dict[str, Any] = {}

    @property
    def scored(self) -> bool:
        """True if the answer must have the log-prob of every token."""
        return self.logprobs


class TextFields(SampledFields):
    """Fields of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Literal[0] | None = None

    @property
    def scored(self) -> bool:
        """True if the answer must have the log-prob of every token."""
        return self.logprobs is not None

    @property
    def limit(self) -> int | None:
        """Largest number of tokens that the client asked for."""
        return self.max_tokens

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [cast("list[int]", self.prompt)] if isinstance(next(iter(self.prompt), ""), int) else self.prompt  # pyright: ignore


def fields(kind: type[_T], body: JsonObject) -> _T:
    """Read the fields of a request.

    Raises:
        RefusedError: a field is missing or not supported, or has another type or range; the error names it.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        # pydantic's "extra inputs are not permitted" does not say that the server lacks the feature.
        why = "not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise RefusedError(400, f"{name}: {why[0].lower()}{why[1:]}", field=name) from None


@dataclass(frozen=True)
class ContextLimits:
    """Size of the contexts that a run's model can read.

    Attributes:
        tokens: largest number of tokens of a context including its completion; infinite if the model has no limit.
        token_chars: largest number of characters of a token.
    """

    tokens: float
    token_chars: int

    @classmethod
    def of(cls, context: RunContext) -> ContextLimits:
        """Return the limits of a run's model and engine."""
        # A server may have been started with a shorter context than the model's.
        tokens = min(positions(context.trained.loaded.model), context.sampler.max_model_len)
        return cls(tokens, max(map(len, context.chat.tokenizer.get_vocab()), default=1))

    @property
    def chars(self) -> float:
        """Largest number of characters of a context."""
        return self.tokens * self.token_chars

    @property
    def max_bytes(self) -> int:
        """Largest size of a request."""
        # `chars` is infinite for a model without a limit, and memory is not.
        return int(min(_LONGEST, self.chars)) + _OVERHEAD

    def check(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
        """Raise `RefusedError`, before tokenization, for messages that cannot fit even with the fewest tokens."""
        chars = sum(len(message["role"]) + len(message["content"]) for message in messages)
        chars += len(json.dumps(tools)) if tools else 0
        # Tokenizing megabytes takes seconds, in which no other request is tokenized.
        if chars > self.chars or len(messages) > self.tokens:
            raise too_long(
                f"{len(messages)} messages of {chars} characters do not fit into {self.tokens:g} tokens, of which the "
                f"longest has {self.token_chars} characters"
            )


MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "retrain"}
"""The only model of an endpoint, in the OpenAI format."""
MODELS = {"object": "list", "data": [MODEL]}
