"""Calls of a user's class: what a verb raises names the class, and what it returns is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrain.registry.call import Call, shown
from retrain.types import Batch, Completion, Problem, Request

LONGEST_PROMPT = 1_000_000
"""Characters of a prompt; tokenizing one that no model could read would take the memory of the run."""
_DEEPEST, _LARGEST = 100, 4096
"""Levels of a component's state, and bits of a number in it."""
ResultCheck = Callable[..., None]
"""Called with the call, what the verb returned, and its arguments; raises the call's error if that cannot be used."""


def anything(call: Call, found: Any, *arguments: Any) -> None:
    """Nobody reads what this verb returns, or nothing can be wrong with it."""


def problem(call: Call, found: Any, *arguments: Any) -> None:
    """A Problem whose fields have their types."""
    if not isinstance(found, Problem):
        raise call.fail(f"problem {', '.join(map(str, arguments))} is {shown(found)}, not a retrain.types.Problem")
    fields: dict[str, Any] = {"id": found.id, "answer": found.answer, "solution": found.solution or ""}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise call.fail(f"{name} of problem {shown(found.id)} is {shown(value)}, not text")
    if wrong := _unfit_prompt(found.prompt):
        raise call.fail(f"the prompt of problem {shown(found.id)} {wrong}")


def _unfit_prompt(prompt: Any) -> str:
    """Why nothing can be asked with a prompt, or ""."""
    texts: list[Any] = [prompt]
    if isinstance(prompt, list):
        if not all(isinstance(message, Mapping) and "role" in message for message in prompt):
            return f"is {shown(prompt)}; a message is a dict with role and content"
        texts = [message.get("content") for message in prompt]
    for text in texts:
        if not isinstance(text, str):
            return f"is {shown(text)}, not text"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"has a lone surrogate ({shown(text)}), which no tokenizer takes"
    if not any(texts):
        return "is empty"
    size = sum(map(len, texts))
    return f"has {size:,} characters; at most {LONGEST_PROMPT:,} are read" if size > LONGEST_PROMPT else ""


def problems(call: Call, found: Any, *arguments: Any) -> None:
    """A list of problems."""
    if not isinstance(found, list):
        raise call.fail(f"heldout returned {shown(found)}, not a list of problems")
    for one in found:
        problem(call, one)


def fingerprint(call: Call, found: Any, *arguments: Any) -> None:
    """A hash as text, or None."""
    if not isinstance(found, str | None):
        raise call.fail(f"fingerprint returned {shown(found)}, not text or None")


def completions(call: Call, found: Any, requests: Sequence[Request], sampling: Any) -> None:
    """The completions of every request, each with a log-prob for every token."""
    if not isinstance(found, Sequence) or len(found) != len(requests):
        raise call.fail(
            f"sample returned {shown(found)}, not a list of completions for each of {len(requests)} requests"
        )
    for request, group in zip(requests, found, strict=True):
        if not isinstance(group, Sequence) or len(group) != request.count:
            raise call.fail(f"sample returned {shown(group)} for a request of {request.count} completions")
        for one in group:
            if not isinstance(one, Completion) or not len(one.ids) == len(one.logprobs) <= request.max_tokens:
                raise call.fail(
                    f"sample returned {shown(one)}; a completion is a retrain.types.Completion of at most "
                    f"{request.max_tokens} tokens, with a log-prob for each"
                )


def _unstorable(value: Any, depth: int = 0) -> str:
    """The first thing in a state that a checkpoint cannot hold, or ""."""
    if depth > _DEEPEST:
        return f"a value nested more than {_DEEPEST} deep, or in itself"
    if isinstance(value, int) and value.bit_length() > _LARGEST:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | str):
        return ""
    if hasattr(type(value), "untyped_storage"):
        plain = not (value.is_meta or value.is_quantized or str(value.layout) != "torch.strided")
        return "" if plain else "a tensor that holds no plain numbers"
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return next(filter(None, (_unstorable(one, depth + 1) for one in value)), "")
    return shown(value)


def state(call: Call, found: Any, *arguments: Any) -> None:
    """A dict that a checkpoint can hold."""
    if (wrong := _unstorable(found)) or not isinstance(found, dict):
        raise call.fail(f"state_dict returned {wrong or shown(found)}; a state is a dict of JSON and tensors")


def metrics(call: Call, found: Any, *arguments: Any) -> None:
    """Metrics with names that are free."""
    call.metrics(found)


TASK: Mapping[str, ResultCheck] = {
    **{"problem": problem, "heldout": problems, "fingerprint": fingerprint, "learn": metrics, "state_dict": state},
    **{"pose": anything, "figures": anything, "spans": anything, "load_state_dict": anything},
}
ENGINE: Mapping[str, ResultCheck] = {"sample": completions} | dict.fromkeys(
    ("keep_sampling", "load_weights", "load_adapter", "describe", "metrics", "hurry", "close"), anything
)
EXECUTOR: Mapping[str, ResultCheck] = {"run": anything}
PART: Mapping[str, ResultCheck] = {"state_dict": state} | dict.fromkeys(
    ("before", "after", "load_state_dict", "export"), anything
)


def misread(whole: type[Any], protocol: type[Any]) -> str:
    """The first verb of a class that cannot be called as its protocol calls it, with how that is; or ""."""
    for verb, default in inspect.getmembers(protocol, inspect.isfunction):
        own = inspect.getattr_static(whole, verb)
        if verb.startswith("_") or own is default or not inspect.isfunction(own):
            continue
        asked = [*inspect.signature(default).parameters.values()]
        given, names = inspect.signature(own), [one.name for one in asked]
        try:
            given.bind(*(one.name for one in asked if one.kind is one.POSITIONAL_OR_KEYWORD))
            # Taken by position: a name of the protocol in another place is two arguments the wrong way round.
            found = [one.name for one in given.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
            if all(name not in names or names.index(name) == place for place, name in enumerate(found)):
                continue
        except TypeError:
            pass
        return f"has {verb}{given}, and it is called as {verb}({', '.join(names[1:])})"
    return ""


def _columns(arguments: Sequence[Any]) -> dict[str, Any]:
    """The tensors that a verb is called with: of batches, and of plain dicts, such as weights."""
    found = dict[str, Any]()
    for one in arguments:
        if isinstance(one, Batch):
            found |= {**vars(one), **one.extra}
        elif type(one) is dict:
            found |= one
    return found


def guarded(base: type[Any], protocol: type[Any], call: Call, verbs: Mapping[str, ResultCheck]) -> type[Any]:
    """The class with those of these verbs guarded that it writes itself, and with its `__init__`."""

    def guard(verb: str, check: ResultCheck) -> Callable[..., Any]:
        real = getattr(base, verb)

        def called(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with call(_columns(arguments)):
                found = real(self, *arguments, **keywords)
                check(call, found, *arguments)
            return found

        return called

    # A default must stay the protocol's own: `StatefulComponent` tells by that whether a class keeps state.
    own = {verb: check for verb, check in verbs.items() if getattr(base, verb) is not getattr(protocol, verb)}
    methods = {verb: guard(verb, check) for verb, check in {"__init__": anything, **own}.items()}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **methods})
