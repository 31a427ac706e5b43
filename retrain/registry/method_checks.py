"""Check what the methods of a user's class return, and name the component in errors.

A plug-in is the user's own code: these checks find mistakes, and do not guard against hostile objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from retrain.errors import ComponentError
from retrain.registry.call import Call, shown
from retrain.types import (
    REWARD_RANGE,
    Batch,
    Completion,
    ExpertRow,
    Problem,
    Request,
    Rollout,
    Sampling,
    is_reward,
    mistyped,
)

ResultCheck = Callable[..., None]
"""(call, result of the method, its arguments) -> None; it raises `call.fail(...)` if the result is invalid."""


def anything(call: Call, found: Any, *arguments: Any) -> None:
    """Accept any result, because it is not used or always valid."""


def problem(call: Call, found: Any, *arguments: Any) -> None:
    """Require a Problem whose fields have the right types, and whose prompt is not empty."""
    if not isinstance(found, Problem):
        raise call.fail(f"problem {', '.join(map(str, arguments))} is {shown(found)}, not a retrain.types.Problem")
    fields: dict[str, Any] = {"id": found.id, "answer": found.answer, "solution": found.solution or ""}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise call.fail(f"{name} of problem {shown(found.id)} is {shown(value)}, not text")
    if wrong := _prompt_problem(found.prompt):
        raise call.fail(f"the prompt of problem {shown(found.id)} {wrong}")


def _prompt_problem(prompt: Any) -> str:
    """Return the reason why a prompt is invalid, or ""."""
    texts: list[Any] = [prompt]
    if isinstance(prompt, list):
        if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
            return f"is {shown(prompt)}; a message is a dict with role and content"
        texts = [message.get("content") for message in prompt]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        return f"is {shown(wrong[0])}, not text"
    return "" if any(texts) else "is empty"


def problems(call: Call, found: Any, *arguments: Any) -> None:
    """Require a list of problems."""
    if not isinstance(found, list):
        raise call.fail(f"heldout returned {shown(found)}, not a list of problems")
    for one in found:
        problem(call, one)


def fingerprint(call: Call, found: Any, *arguments: Any) -> None:
    """Require a hash as text, or None."""
    if not isinstance(found, str | None):
        raise call.fail(f"fingerprint returned {shown(found)}, not text or None")


def completions(call: Call, found: Any, requests: Sequence[Request], sampling: Sampling) -> None:
    """Require valid completions of every request."""
    if not isinstance(found, Sequence) or len(found) != len(requests):
        raise call.fail(
            f"sample returned {shown(found)}, not a list of completions for each of {len(requests)} requests"
        )
    for request, group in zip(requests, found, strict=True):
        if not isinstance(group, Sequence) or len(group) != request.count:
            raise call.fail(f"sample returned {shown(group)} for a request of {request.count} completions")
        for one in group:
            if not isinstance(one, Completion):
                raise call.fail(f"sample returned {shown(one)}, not a retrain.types.Completion")
            if wrong := one.mistake(request, sampling):
                raise call.fail(f"sample returned {shown(one)}: {wrong}")


def _unstorable(value: Any) -> str:
    """Describe the first value in a state that a checkpoint cannot store, or return ""."""
    if value is None or isinstance(value, bool | int | float | str) or hasattr(type(value), "untyped_storage"):
        return ""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = [*value.values()]
    return next(filter(None, map(_unstorable, value)), "") if isinstance(value, list | tuple) else shown(value)


def state(call: Call, found: Any, *arguments: Any) -> None:
    """Require a dict that a checkpoint can store."""
    if (wrong := _unstorable(found)) or not isinstance(found, dict):
        raise call.fail(f"state_dict returned {wrong or shown(found)}; a state is a dict of JSON and tensors")


def metrics(call: Call, found: Any, *arguments: Any) -> None:
    """Require valid metrics whose names the run itself does not use."""
    call.metrics(found)


def source_rows(call: Call, found: Any, step: int, rollouts: Sequence[Rollout]) -> None:
    """Require a list of rollouts and expert rows, or a tuple of such a list and metrics.

    New rows must be valid. The rollouts that the source was given are not checked again.
    """
    given = {id(one) for one in rollouts}
    rows, reported = call.split(found)
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
    if not isinstance(row.reward, int | float) or not is_reward(row.reward):
        return f"its reward is not a number {REWARD_RANGE}"
    if wrong := mistyped(row):
        return wrong
    if len(row.sampler_logprobs) != len(row.completion_ids):
        return f"{len(row.completion_ids)} completion ids, but {len(row.sampler_logprobs)} log-probs"
    if not all(is_reward(turn.reward) for turn in row.turns):
        return f"the reward of a turn is not a number {REWARD_RANGE}"
    if any(len(turn.versions) not in (0, turn.end - turn.start) for turn in row.turns):
        return "a turn has another number of versions than tokens"
    return _span_problem((*row.prompt_ids, *row.completion_ids), row.spans)


def _span_problem(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> str:
    """Return the reason why the spans of a row cannot be trained on, or ""."""
    if min(ids, default=0) < 0:
        return "a token id is negative"
    ends = [1, *(end for _, end in spans)]
    if not spans or any(
        not before <= start < end <= len(ids) for before, (start, end) in zip(ends, spans, strict=False)
    ):
        return f"the spans to train on, {shown(spans)}, must be non-empty, in order and between 1 and {len(ids)}"
    return ""


_TASK: Mapping[str, ResultCheck] = {
    **{"problem": problem, "heldout": problems, "fingerprint": fingerprint, "learn": metrics, "state_dict": state},
    **{"pose": anything, "figures": anything, "spans": anything, "load_state_dict": anything},
}
_PART: Mapping[str, ResultCheck] = {"state_dict": state} | dict.fromkeys(
    ("before", "after", "load_state_dict", "export"), anything
)
CHECKS: Mapping[str, Mapping[str, ResultCheck]] = {
    "task": _TASK,
    "curriculum": _TASK,
    "source": {
        **{"take": source_rows, "fingerprint": fingerprint, "after": metrics, "state_dict": state},
        "load_state_dict": anything,
    },
    "engine": {"sample": completions}
    | dict.fromkeys(("load_weights", "load_adapter", "describe", "metrics", "request_stop", "close"), anything),
    **dict.fromkeys(("filter", "uncertainty", "advantage", "transform", "algorithm", "signal"), _PART),
    "executor": {"run": anything},
}
"""Kind -> method -> check of its result. A kind that is missing here is not checked."""


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
    verbs = CHECKS.get(call.kind)
    return guarded(whole, protocol, call, verbs) if verbs else whole


def wrong_signature(whole: type[Any], protocol: type[Any]) -> str:
    """Describe the first method whose signature does not fit the protocol; return "" if all fit.

    A method must take the arguments that the protocol passes by position, and must not name them in another order.
    """
    for verb, default in inspect.getmembers(protocol, inspect.isfunction):
        own = inspect.getattr_static(whole, verb)
        if verb.startswith("_") or own is default or not inspect.isfunction(own):
            continue
        expected = [*inspect.signature(default).parameters.values()]
        signature, names = inspect.signature(own), [one.name for one in expected]
        try:
            signature.bind(*(one.name for one in expected if one.kind is one.POSITIONAL_OR_KEYWORD))
            # Arguments are passed by position, so the protocol's names in another order mean a mistake.
            found = [one.name for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
            if all(name not in names or names.index(name) == position for position, name in enumerate(found)):
                continue
        except TypeError:
            pass
        return f"has {verb}{signature}, but it is called as {verb}({', '.join(names[1:])})"
    return ""


def _columns(arguments: Sequence[Any]) -> dict[str, Any]:
    """Collect the columns of the batches and dicts among a method's arguments. The method must not modify them."""
    found = dict[str, Any]()
    for one in arguments:
        if isinstance(one, Batch):
            found |= {**vars(one), **one.extra}
        elif type(one) is dict:
            found |= one
    return found


def guarded(base: type[Any], protocol: type[Any], call: Call, verbs: Mapping[str, ResultCheck]) -> type[Any]:
    """Return a subclass of `base` that checks calls of `__init__` and of the methods that `base` overrides.

    Args:
        base: the user's class.
        protocol: its protocol; methods inherited from it are not checked.
        call: names the component in errors.
        verbs: method -> check of its result.
    """

    def wrapped(verb: str, check: ResultCheck) -> Callable[..., Any]:
        real = getattr(base, verb)

        def called(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with call(_columns(arguments)):
                found = real(self, *arguments, **keywords)
                check(call, found, *arguments)
            return found

        return called

    # Inherited methods must stay identical to the protocol's functions, because `StatefulComponent`
    # compares them to determine whether a class has state.
    own = {verb: check for verb, check in verbs.items() if getattr(base, verb) is not getattr(protocol, verb)}
    methods = {verb: wrapped(verb, check) for verb, check in {"__init__": anything, **own}.items()}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **methods})
