"""Python functions as tools that the model may call."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from retrain import Say, environment
from retrain.environments.contract import Game, Limits, Reply
from retrain.errors import ComponentError, did_you_mean
from retrain.system import model_code

ToolCall = tuple[str, Mapping[str, Any] | str]
"""Name and arguments of a tool; or an empty name, and why the text is no call."""

_PYTHON_S, _LONGEST = 5.0, 1 << 15
"""Of the tool `python`: seconds for a call, and bytes of what it prints that are read."""

_TYPES: dict[tuple[type, ...], str] = {
    (bool,): "boolean",
    (int,): "integer",
    (float,): "number",
    (str,): "string",
    (dict, Mapping): "object",
    (list, tuple, Sequence): "array",
}
"""The first that a class is a subclass of is its type in JSON."""

_ARGUMENTS = re.compile(r"^Args:\n((?:[ \t]+\S.*\n?|[ \t]*\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \(.*?\))?:(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_JSON, _PYTHON = (re.compile(rf"```{name}\n(.*?)(?:```|$)", re.DOTALL) for name in ("json", "python"))
_FORMS = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "json": 'a ```json block of {"name": ..., "arguments": {...}}',
    "python": "a ```python block of calls such as name(key=1)",
}


def importable(*keys: str) -> Callable[[Mapping[str, Any], Any], Iterator[Any]]:
    """The check of an environment whose parameters of these names are dotted paths to code of the user's."""

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Any]:
        from retrain import Finding

        for key in keys if config.environment.python is None else ():  # another interpreter's packages are not here
            paths: Sequence[str] = [params[key]] if isinstance(params[key], str) else params[key]
            if not paths:
                yield Finding((key,), "is empty, so there would be no tool", "name a function")
            for place, path in enumerate(paths):
                try:
                    _check_path(key, path, key == "functions" and params["describe"], config.plugins.search_paths)
                    if path.replace(":", ".") == f"{__name__}.python" and (why := _unprotected(config)):
                        raise ComponentError(f"the tool python runs code of the model, and {why[0]}", why[1])
                    if _name(path) in map(_name, paths[:place]):
                        raise ComponentError(f'two tools are called "{_name(path)}"', "rename one of the functions")
                except ComponentError as error:
                    yield Finding((key,) if paths is not params[key] else (key, place), error.problem, error.fix)

    return check


def _unprotected(config: Any) -> tuple[str, str] | None:
    """Why there would be no sandbox around an environment, and what to do; None if there is one."""
    if config.environment.workers == 0:
        return "[environment] workers = 0 runs it in the trainer itself", "set [environment] workers = 1"
    if config.reward_pool.sandbox == "off":
        return '[reward_pool] sandbox = "off" leaves it without protection', 'set [reward_pool] sandbox = "auto"'
    from retrain.system.sandbox import missing

    if why := missing():
        return f"this machine has no sandbox ({why})", "allow unprivileged user namespaces, or leave the tool out"
    return None


def _check_path(key: str, path: str, shown: bool, search_paths: Sequence[str]) -> None:
    from retrain.registry import is_dotted, lookup

    if key == "parser" and path in PARSERS:
        return
    if key == "parser" and not is_dotted(path):
        fix = did_you_mean(path, [*PARSERS], f"use {', '.join(PARSERS)}, or a dotted path to your own")
        raise ComponentError(f'there is no parser "{path}"', fix)
    if not callable(found := lookup.load_object(path, search_paths)):
        raise ComponentError(f'"{path}" is a {type(found).__name__}, not a function', "point to a function")
    try:
        _ = shown and schema(path, found)
    except Exception as error:  # a type hint is code of the user's
        raise ComponentError(f'"{path}" cannot be shown to a model: {error}', "wrap it in a function") from error


@environment("tools", rewards=False, check_code=importable("functions", "parser"), imports=("functions", "parser"))
def tools(*, functions: list[str], parser: str = "hermes", describe: bool = True) -> Game:
    """The model calls tools; its first reply without a call ends the episode, and [[rewards]] score that reply.

    A call that is broken, names no tool, or raises, is answered `error: ...`. env/tool_calls and env/tool_errors are
    the calls and errors of an episode.

    Args:
        functions: dotted paths, of coroutine functions too; their signatures, and the first line and the `Args:` of
            their docstrings, are what the model is told.
        parser: how a call is written: "hermes", "json" or "python"; or the dotted path of `fn(text)`, which returns
            (name, arguments) of every call.
        describe: begin with the tools' schemas, in the chat template's own place for them if it has one; else in the
            prompt, with how to call them.
    """
    named = {_name(path): load_object(path) for path in functions}
    yield from called(named, parser, describe)
    return None


def called(
    named: Mapping[str, Callable[..., Any]],
    parser: str,
    describe: bool,
    first: str | None = None,
    limits: Limits | None = None,
) -> Generator[Say, Reply]:
    """Answer the model's calls of tools until a reply has none.

    Args:
        named: the tools.
        parser, describe: see `tools`.
        first: is added to the prompt.
        limits: it ends with the last reply that they allow, whose calls are made; None leaves that to the driver.
    """
    parse = PARSERS.get(parser) or load_object(parser)
    how = f"Call a tool with {_FORMS.get(parser, 'its syntax')}\n"
    schemas = [schema(name, function) for name, function in named.items()] if describe else []
    lines = "".join(json.dumps(one) + "\n" for one in schemas)
    reply = yield Say(first, tools=schemas, tools_text=f"\nTools:\n{lines}{how}" * describe)
    while calls := parse(reply):
        answers = [_call(named, name, arguments) for name, arguments in calls]
        broken = sum(text.startswith("error: ") for text in answers)
        if limits and (reply.turn + 1 >= limits.max_turns or reply.tokens_left <= 0):
            return
        reply = yield Say("\n".join(answers), role="tool", metrics={"tool_calls": len(calls), "tool_errors": broken})


def python(code: str) -> str:
    """Run Python code and see what it prints."""
    if not model_code.available():
        raise SystemExit("the tool python runs code of the model, and there is no sandbox around it")
    return model_code.run(code, _PYTHON_S, _LONGEST)


def schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """What a model is told of a function, as JSON schema; `*args` and `**keys` are left out.

    ValueError if it has a parameter without a default that cannot be given by name.
    """
    found, required, doc = dict[str, Any](), list[str](), inspect.getdoc(function) or ""
    section = _ARGUMENTS.search(doc)
    about = {key: " ".join(text.split()) for _, key, text in _ARGUMENT.findall(section[1] if section else "")}
    for key, one in inspect.signature(function, eval_str=True).parameters.items():
        if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
            raise ValueError(f"its parameter {key!r} cannot be given by name")
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            found[key] = shape(str if one.annotation is one.empty else one.annotation)
            found[key] |= {"description": about[key]} if about.get(key) else {}
            required += [key] if one.default is one.empty else []
    parameters = {"type": "object", "properties": found, "required": required}
    return {"name": name, "description": doc.partition("\n")[0], "parameters": parameters}


def shape(hint: Any) -> dict[str, Any]:
    """JSON schema of a type; `{}`, which is anything, if JSON has no such type.

    Not pydantic's, which the interpreter of `[environment] python` need not have.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return shape(inner[0])
    if origin is Literal:
        return {**(shape(type(inner[0])) if len({type(one) for one in inner}) == 1 else {}), "enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [shape(one) for one in inner]}
    if hint in (None, type(None)):
        return {"type": "null"}
    kind = origin or hint
    known = (name for types, name in _TYPES.items() if isinstance(kind, type) and issubclass(kind, types))
    found: dict[str, Any] = {"type": name} if (name := next(known, "")) else {}
    within = {"array": "items", "object": "additionalProperties"}.get(name)
    return {**found, within: shape(inner[-1])} if within and inner and kind is not tuple else found


def hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and most others write it."""
    return _calls(_HERMES.findall(text), _of_json)


def json_block(text: str) -> list[ToolCall]:
    """A fenced block of JSON: one call or a list of them."""
    return _calls(_JSON.findall(text), _of_json)


def python_block(text: str) -> list[ToolCall]:
    """Calls with literal arguments by name in a fenced block of Python, which is read and never run."""
    return _calls(_PYTHON.findall(text), _of_python)


PARSERS: dict[str, Callable[[str], Sequence[ToolCall]]] = {"hermes": hermes, "json": json_block, "python": python_block}


def _calls(found: Sequence[str], read: Callable[[str], Iterator[ToolCall]]) -> list[ToolCall]:
    """The calls in each of these texts, up to where one is broken."""
    calls: list[ToolCall] = []
    for text in found:
        try:
            calls.extend(read(text))
        except Exception as error:  # a literal can raise nearly anything, such as RecursionError and MemoryError
            calls.append(("", f"this is no call: {type(error).__name__}: {error}"))
    return calls


def _of_json(text: str) -> Iterator[ToolCall]:
    value = json.loads(text)
    for call in value if isinstance(value, list) else [value]:
        match call:
            case {"name": str(name), "arguments": dict(arguments)}:
                yield name, arguments
            case {"name": str(name)} if "arguments" not in call:
                yield name, {}
            case _:
                yield "", f'{str(call)[:200]} is no call: write {{"name": ..., "arguments": {{...}}}}'


def _of_python(text: str) -> Iterator[ToolCall]:
    for line in ast.parse(text.strip()).body:
        match line:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[], keywords=keys)) if all(k.arg for k in keys):
                yield name, {str(one.arg): ast.literal_eval(one.value) for one in keys}
            case _:
                yield "", f"{ast.unparse(line)[:200]} is no call of a tool with arguments by name"


def _call(named: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return f"error: {arguments}"
    if name not in named:
        return f"error: there is no tool {name!r}; there are {', '.join(named)}"
    try:
        found = named[name](**arguments)
        return str(asyncio.run(found) if inspect.iscoroutine(found) else found)
    except Exception as error:  # the model's mistake is an observation
        return f"error: {type(error).__name__}: {error}"


def _name(path: str) -> str:
    return path.replace(":", ".").rpartition(".")[2]


@cache
def load_object(path: str) -> Callable[..., Any]:
    """What a dotted path names."""
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)
