"""Check what the methods of a user's class return, and name the component in errors.

A plug-in is the user's own code: these checks find mistakes, and do not guard against hostile objects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partialmethod
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from retrain.errors import ComponentError
from retrain.protocols import Tracker
from retrain.registry.call import Call, shown
from retrain.types import REWARD_RANGE, Batch, Completion, ExpertRow, Problem, Request, Rollout, Sampling, is_reward

ResultCheck = Callable[..., None]
"""(call, result of the method, its arguments) -> None; it raises `call.fail(...)` if the result is invalid."""

_LARGEST_LOGPROB = 1e-3
"""Largest log-prob of a sampled token: 0, and what rounding may add."""


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def mistyped(row: Any) -> str:
    """Describe the first field of a dataclass that does not have its type, or return "".

    The row is validated as JSON: a list may stand for a tuple and 1 for 1.0, but not "1" for 1. NaN and infinity become
    texts, so they are no numbers.
    """
    try:
        _adapter(type(row)).validate_json(to_json(row, inf_nan_mode="strings"), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"its {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except PydanticSerializationError as error:
        return str(error)
    return ""


def problem(call: Call, result: Any, *arguments: Any) -> None:
    """Require a Problem whose fields have the right types, and whose prompt is not empty."""
    if not isinstance(result, Problem):
        raise call.fail(f"problem {', '.join(map(str, arguments))} is {shown(result)}, not a retrain.types.Problem")
    if wrong := _prompt_problem(result.prompt):
        raise call.fail(f"the prompt of problem {shown(result.id)} {wrong}")
    if wrong := mistyped(replace(result, prompt="", extra={})):  # `extra` may hold anything
        raise call.fail(f"problem {shown(result.id)}: {wrong}")


def _prompt_problem(prompt: Any) -> str:
    """Return the reason why a prompt is invalid, or ""; a chat template would render None as text."""
    texts: list[Any] = [prompt]
    if isinstance(prompt, list):
        if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
            return f"is {shown(prompt)}; a message is a dict with role and content"
        texts = [message.get("content") for message in prompt]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        return f"is {shown(wrong[0])}, not text"
    return "" if any(texts) else "is empty"


def problems(call: Call, result: Any, *arguments: Any) -> None:
    """Require a list of problems."""
    if not isinstance(result, list):
        raise call.fail(f"heldout returned {shown(result)}, not a list of problems")
    for item in cast("list[Any]", result):
        problem(call, item)


def completions(call: Call, result: Any, requests: Sequence[Request], sampling: Sampling) -> None:
    """Require valid completions of every request."""
    counts = [request.count for request in requests]
    groups = cast("Sequence[Any]", result) if isinstance(result, Sequence) else ()
    if [len(group) if isinstance(group, Sequence) else None for group in groups] != counts:
        raise call.fail(f"sample returned {shown(result)}, not lists of {counts} completions")
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            if not isinstance(completion, Completion):
                raise call.fail(f"sample returned {shown(completion)}, not a retrain.types.Completion")
            if wrong := completion_mistake(completion, request, sampling):
                raise call.fail(f"sample returned {shown(completion)}: {wrong}")


def completion_mistake(completion: Completion, request: Request, sampling: Sampling) -> str:
    """Return the reason why this cannot be a completion of the request, or ""."""
    if wrong := mistyped(completion):
        return wrong
    size = len(completion.ids)
    stops = [index for index, token in enumerate(completion.ids) if token in sampling.stop_ids]
    logprobs, versions = len(completion.logprobs), len(completion.versions)
    if not 0 < size <= request.max_tokens or logprobs != size or versions not in (0, size):
        counts = f"{logprobs} log-probs and {versions} versions"
        return f"{size} tokens with {counts}, and max_tokens = {request.max_tokens}"
    if min(completion.ids) < 0 or max(completion.ids) >= sampling.vocabulary:
        return f"a token id is not between 0 and {sampling.vocabulary - 1}"
    if max(completion.logprobs) > _LARGEST_LOGPROB:
        return f"a log-prob is {max(completion.logprobs):g}, which is above 0"
    # A stop id ends the completion, so no other token than the last can be one.
    if completion.finish_reason != ("stop" if stops else "length") or (stops and stops[0] != size - 1):
        return f'it was ended by "{completion.finish_reason}", and has stop ids at {stops} of {size} tokens'
    return ""


def _unstorable(value: Any) -> str:
    """Describe the first value in a state that a checkpoint cannot store, or return ""."""
    # Only tensors have `untyped_storage`.
    if value is None or isinstance(value, bool | int | float | str) or hasattr(type(value), "untyped_storage"):
        return ""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = [*value.values()]
    return next(filter(None, map(_unstorable, value)), "") if isinstance(value, list | tuple) else shown(value)


def state(call: Call, result: Any, *arguments: Any) -> None:
    """Require a dict that a checkpoint can store."""
    if (wrong := _unstorable(result)) or not isinstance(result, dict):
        raise call.fail(f"state_dict returned {wrong or shown(result)}; a state is a dict of JSON and tensors")


def metrics(call: Call, result: Any, *arguments: Any) -> None:
    """Require valid metrics whose names the run itself does not use."""
    call.metrics(result)


def source_rows(call: Call, result: Any, step: int, rollouts: Sequence[Rollout]) -> None:
    """Require a list of rollouts and expert rows, or a tuple of such a list and metrics.

    New rows must be valid. The rollouts that the source was given are not checked again.
    """
    given = {id(rollout) for rollout in rollouts}
    rows, reported = call.split(result)
    call.metrics(reported)
    if not isinstance(rows, list):
        raise call.fail(f"take returned {shown(rows)}, not a list of rollouts and expert rows")
    for row in cast("list[Any]", rows):
        if isinstance(row, Rollout):
            wrong = "" if id(row) in given else _rollout_problem(row)
        elif isinstance(row, ExpertRow):
            wrong = mistyped(row) or _span_problem(row.ids, row.spans)
        else:
            wrong = "it is neither a retrain.types.Rollout nor an ExpertRow"
        if wrong:
            raise call.fail(f"take returned {shown(row)}: {wrong}")


def _rollout_problem(row: Rollout) -> str:
    """Return the reason why a rollout cannot be part of a batch, or ""."""
    if wrong := mistyped(row):
        return wrong
    if row.reward is None or not all(map(is_reward, (row.reward, *(turn.reward for turn in row.turns)))):
        return f"its reward, or that of a turn, is not a number {REWARD_RANGE}"
    if len(row.sampler_logprobs) != len(row.completion_ids):
        return f"{len(row.completion_ids)} completion ids, but {len(row.sampler_logprobs)} log-probs"
    if any(len(turn.versions) not in (0, turn.end - turn.start) for turn in row.turns):
        return "a turn has another number of versions than tokens"
    return _span_problem((*row.prompt_ids, *row.completion_ids), row.spans)


def _span_problem(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> str:
    """Return the reason why the spans of a row cannot be trained on, or ""."""
    bounds = [bound for span in spans for bound in span]
    # The first token has no predecessor, and so no log-prob. Spans may touch, but not be empty.
    in_order = bounds == sorted(bounds) and all(start < end for start, end in spans)
    if bounds and in_order and bounds[0] >= 1 and bounds[-1] <= len(ids) and min(ids) >= 0:
        return ""
    return f"token ids must not be negative, and the spans {shown(spans)} in order and between 1 and {len(ids)}"


CHECKS: Mapping[str, ResultCheck] = {
    "problem": problem,
    "heldout": problems,
    "learn": metrics,
    "after": metrics,
    "state_dict": state,
    "sample": completions,
    "take": source_rows,
}
"""Method of a protocol -> check of its result. The result of another method is not used, or always valid."""


def checked(call: Call, whole: type[Any], protocol: type[Any]) -> type[Any]:
    """Return a user's class with checks of its calls.

    Args:
        call: names the component in errors.
        whole: the class with the defaults of its protocol.
        protocol: its protocol.
    Raises:
        ComponentError: a required method is missing, or a signature does not fit the protocol.
    """
    lacking = ", ".join(sorted(getattr(whole, "__abstractmethods__", ())))
    if wrong := f"lacks {lacking}" if lacking else wrong_signature(whole, protocol):
        raise ComponentError(f"{call.kind} {call.name!r} {wrong}", f"see {protocol.__name__} in retrain/protocols.py")
    # The thread of the trackers reports their errors and goes on, so that they do not end a run.
    return whole if protocol is Tracker else _guarded(call, whole, protocol)


def wrong_signature(whole: type[Any], protocol: type[Any]) -> str:
    """Describe the first method whose signature does not fit the protocol; return "" if all fit.

    A method must take the arguments that the protocol passes by position, and must not name them in another order.
    """
    for method, default in inspect.getmembers(protocol, inspect.isfunction):
        defined = inspect.getattr_static(whole, method)
        if method.startswith("_") or defined is default or not inspect.isfunction(defined):
            continue
        expected, signature = inspect.signature(default), inspect.signature(defined)
        passed = [name for name, p in expected.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        try:
            signature.bind(*passed)
            # Arguments are passed by position, so the protocol's names in another order mean a mistake.
            fits = all(name not in passed or passed.index(name) == index for index, name in enumerate(names))
        except TypeError:
            fits = False
        if not fits:
            return f"has {method}{signature}, but it is called as {method}({', '.join([*expected.parameters][1:])})"
    return ""


def _columns(arguments: Sequence[Any]) -> dict[str, Any]:
    """Collect the columns of the batches and dicts among a method's arguments. The method must not modify them."""
    columns = dict[str, Any]()
    for argument in arguments:
        if isinstance(argument, Batch):
            columns |= {**vars(argument), **argument.extra}
        elif type(argument) is dict:
            columns |= argument
    return columns


def _guarded(call: Call, base: type[Any], protocol: type[Any]) -> type[Any]:
    """Return a subclass of a user's class that checks calls of `__init__` and of the methods that the class defines."""

    def called(self: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
        with call(_columns(arguments)):
            result = getattr(base, method)(self, *arguments, **keywords)
            if method in CHECKS:
                CHECKS[method](call, result, *arguments)
        return result

    # Inherited methods must stay identical to the protocol's functions, because `StatefulComponent`
    # compares them to determine whether a class has state.
    defaults = inspect.getmembers(protocol, inspect.isfunction)
    defined = [name for name, default in defaults if name[0] != "_" and getattr(base, name) is not default]
    methods = {name: partialmethod(called, name) for name in ("__init__", *defined)}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **methods})
