"""Environment in which the model calls Python functions as tools."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from retrain.environments.contract import Action, EpisodeGenerator, Limits, Observation, environment
from retrain.errors import ComponentError, did_you_mean
from retrain.system import bubblewrap

ToolCall = tuple[str, Mapping[str, Any] | str]
"""Name and arguments of a tool call; or "" and the reason why the text is not a valid call."""

_PYTHON_S = 5.0
"""Timeout of the tool `python` in seconds."""
_LONGEST = 1 << 15
"""Largest number of bytes of its output."""

_TYPES: dict[tuple[type, ...], str] = {
    (bool,): "boolean",
    (int,): "integer",
    (float,): "number",
    (str,): "string",
    (dict, Mapping): "object",
    (list, tuple, Sequence): "array",
}
"""Python types and their JSON type; the first row with a base class of the annotation applies."""

_ARGUMENTS = re.compile(r"^Args:\n((?:[ \t]+\S.*\n?|[ \t]*\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \(.*?\))?:(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
_PYTHON = re.compile(r"```python[ \t]*\r?\n(.*?)(?:```|$)", re.DOTALL)
_JSON = re.compile(r"```json[ \t]*\r?\n")
_TOOL_CALL = re.compile("<tool_call>")
_BLANK = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)
"""Accepts line ends within strings, which models write in code."""
_FORMS = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "json": 'a ```json block of {"name": ..., "arguments": {...}}',
    "python": "a ```python block of calls such as name(key=1)",
}


def importable(*keys: str) -> Callable[[Mapping[str, Any], Any], Iterator[Any]]:
    """Return a configuration check for parameters that are dotted paths to the user's code."""

    def check(params: Mapping[str, Any], config: Any) -> Iterator[Any]:
        from retrain.registry.traits import Finding

        # This process cannot import the packages of another interpreter, so it does not check their paths.
        for key in keys if config.environment.python is None else ():
            paths: Sequence[str] = [params[key]] if isinstance(params[key], str) else params[key]
            if not paths:
                yield Finding((key,), "is empty, so there would be no tool", "name a function")
            for index, path in enumerate(paths):
                try:
                    problem = _check_path(key, path, key == "functions" and params["describe"], config)
                    if problem is python and (why := _unprotected(config)):
                        raise ComponentError(f"the tool python runs code of the model, and {why[0]}", why[1])
                    if _name(path) in map(_name, paths[:index]):
                        raise ComponentError(f'two tools are called "{_name(path)}"', "rename one of the functions")
                except ComponentError as error:
                    yield Finding((key,) if paths is not params[key] else (key, index), error.problem, error.fix)

    return check


def _unprotected(config: Any) -> tuple[str, str] | None:
    """Return (reason, fix) if the tool python would run without bubblewrap or without a limit of memory, else None."""
    if config.environment.workers == 0:
        return "[environment] workers = 0 runs it in the trainer itself", "set [environment] workers = 1"
    if why := bubblewrap.missing():
        return f"this machine cannot contain it: {why[0]}", f"{why[1]}, or leave the tool out"
    return None


def _check_path(key: str, path: str, shown: bool, config: Any) -> Any:
    """Import the object of a dotted path, or return the built-in parser of this name.

    Args:
        key: parameter of the environment with this path: "parser" or one for functions.
        path: dotted path, or the name of a built-in parser.
        shown: True if the model sees the function's JSON schema.
        config: sections of the run file.
    Raises:
        ComponentError: the object cannot be imported, is not callable, or has no JSON schema.
    """
    from retrain.registry import is_dotted, lookup

    if key == "parser" and path in PARSERS:
        return PARSERS[path]
    if key == "parser" and not is_dotted(path):
        fix = did_you_mean(path, [*PARSERS], f"use {', '.join(PARSERS)}, or a dotted path to your own")
        raise ComponentError(f'there is no parser "{path}"', fix)
    if not callable(parser := lookup.load_object(path, config.plugins.search_paths)):
        raise ComponentError(f'"{path}" is a {type(parser).__name__}, not a function', "point to a function")
    try:
        _ = shown and schema(path, parser)
    except Exception as error:  # evaluating a type hint runs the user's code
        raise ComponentError(f'"{path}" cannot be shown to a model: {error}', "wrap it in a function") from error
    return parser


@environment("tools", rewards=False, check=importable("functions", "parser"))
def tools(*, functions: list[str], parser: str = "hermes", describe: bool = True) -> EpisodeGenerator:
    """Tool use: the model calls functions until its first action without a call, which [[rewards]] score.

    A call that is malformed, has an unknown name or raises an exception gets the observation
    `error: ...`. The metrics env/tool_calls and env/tool_errors count calls and errors per episode.

    Args:
        functions: dotted paths of functions or coroutine functions. The model sees their signatures,
            and the first line and the `Args:` section of their docstrings.
        parser: syntax of a call: "hermes", "json" or "python"; or the dotted path of `fn(text)`,
            which returns (name, arguments) of every call.
        describe: show the tools' schemas first, as tools of the chat template if it supports them,
            else in the prompt together with the syntax of a call.
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
) -> Generator[Observation, Action]:
    """Execute the model's tool calls until an action has none.

    Args:
        named: tools by name.
        parser, describe: see `tools`.
        first: text to add to the prompt.
        limits: limits of the episode. The generator executes the calls of the last action that they
            allow, and returns. None: the caller enforces the limits.
    """
    parse = PARSERS.get(parser) or load_object(parser)
    how = f"Call a tool with {_FORMS.get(parser, 'its syntax')}\n"
    schemas = [schema(name, function) for name, function in named.items()] if describe else []
    lines = "".join(json.dumps(schema) + "\n" for schema in schemas)
    action = yield Observation(first, tools=schemas, tools_text=f"\nTools:\n{lines}{how}" * describe)
    # An action without a call is the final answer.
    while calls := parse(action):
        answers = [_call(named, name, arguments) for name, arguments in calls]
        broken = sum(text.startswith("error: ") for text in answers)
        # The generator ends itself here, so that the caller can still ask the environment for its reward.
        if limits and (action.turn + 1 >= limits.max_turns or action.tokens_left <= 0):
            return
        action = yield Observation(
            "\n".join(answers), role="tool", metrics={"tool_calls": len(calls), "tool_errors": broken}
        )


def python(code: str) -> str:
    """Run Python code and return its output."""
    return bubblewrap.run(code, _PYTHON_S, _LONGEST)


def schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function for the model; `*args` and `**keys` are left out.

    Raises:
        ValueError: a positional-only parameter has no default.
    """
    properties, required = dict[str, Any](), list[str]()
    doc = inspect.getdoc(function) or ""
    section = _ARGUMENTS.search(doc)
    about = {key: " ".join(text.split()) for _, key, text in _ARGUMENT.findall(section[1] if section else "")}
    for key, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"its parameter {key!r} cannot be given by name")
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            properties[key] = shape(str if parameter.annotation is parameter.empty else parameter.annotation)
            properties[key] |= {"description": about[key]} if about.get(key) else {}
            required += [key] if parameter.default is parameter.empty else []
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": doc.partition("\n")[0], "parameters": parameters}


def shape(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; `{}`, which accepts anything, if JSON has no such type.

    pydantic is not used because the interpreter of `[environment] python` may not have it.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return shape(inner[0])
    if origin is Literal:
        return {**(shape(type(inner[0])) if len({type(value) for value in inner}) == 1 else {}), "enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [shape(member) for member in inner]}
    if hint in (None, type(None)):
        return {"type": "null"}
    kind = origin or hint
    names = (name for types, name in _TYPES.items() if isinstance(kind, type) and issubclass(kind, types))
    shaped: dict[str, Any] = {"type": name} if (name := next(names, "")) else {}
    within = {"array": "items", "object": "additionalProperties"}.get(name)
    # The last type: that of the values in dict[str, int]. A tuple has a type per place.
    return {**shaped, within: shape(inner[-1])} if within and inner and kind is not tuple else shaped


def hermes(text: str) -> list[ToolCall]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the syntax of Qwen and most others.

    Several objects between two tags are as many calls.
    """
    return _calls(_values(text, _TOOL_CALL, "</tool_call>"), _of_json)


def json_block(text: str) -> list[ToolCall]:
    """Parse fenced blocks of JSON, each with calls one after another, or a list of calls."""
    return _calls(_values(text, _JSON, "```"), _of_json)


def python_block(text: str) -> list[ToolCall]:
    """Parse calls with literal keyword arguments in fenced blocks of Python, without running them."""
    return _calls(_PYTHON.findall(text), _of_python)


PARSERS: dict[str, Callable[[str], Sequence[ToolCall]]] = {"hermes": hermes, "json": json_block, "python": python_block}


def _values(text: str, opening: re.Pattern[str], closing: str) -> Iterator[str]:
    """Yield the text between each opening tag and its closing tag, or the end of the text.

    A closing tag within a JSON value, in a string, does not count.
    """
    end = 0
    while opened := opening.search(text, end):
        # Searched behind the JSON, which may contain the tag in a string.
        closed = text.find(closing, _decoded(text, opened.end())[1])
        end = len(text) if closed < 0 else closed
        yield text[opened.end() : end]


def _decoded(text: str, start: int = 0) -> tuple[list[Any], int]:
    """Decode JSON values that follow one another; return them, and the place where the first other text begins."""
    values: list[Any] = []
    with suppress(ValueError, RecursionError):  # `_of_json` reports it
        while (start := cast("re.Match[str]", _BLANK.match(text, start)).end()) < len(text):
            value, start = _DECODER.raw_decode(text, start)
            values.append(value)
    return values, start


def _calls(texts: Iterable[str], read: Callable[[str], Iterator[ToolCall]]) -> list[ToolCall]:
    """Parse the calls in each text; after a malformed call, skip the rest of its text."""
    calls: list[ToolCall] = []
    for text in texts:
        try:
            calls.extend(read(text))
        except Exception as error:  # a literal can raise nearly anything, such as RecursionError and MemoryError
            calls.append(("", f"this is not a call: {type(error).__name__}: {error}"))
    return calls


def _of_json(text: str) -> Iterator[ToolCall]:
    """Yield the calls in JSON objects, or in lists of objects.

    Llama 3 writes "parameters" instead of "arguments". Arguments may be JSON in a string, as in OpenAI's API.
    """
    values, end = _decoded(text)
    if not values or end < len(text):
        _DECODER.decode(text[end:])  # raises the error
    for call in (call for value in values for call in (value if isinstance(value, list) else [value])):
        match call:
            case {"name": str(name), **rest} if isinstance(arguments := _arguments(rest), dict):
                yield name, cast("dict[str, Any]", arguments)
            case _:
                yield "", f'{str(call)[:200]} is not a call: write {{"name": ..., "arguments": {{...}}}}'


def _arguments(rest: dict[str, Any]) -> Any:
    """Return the arguments of a call from its keys without the name; None if there are other keys."""
    # OpenAI's API adds these two.
    keys = rest.keys() - {"id", "type"}
    if len(keys) > 1 or not keys <= {"arguments", "parameters"}:
        return None
    arguments = rest[keys.pop()] if keys else {}
    return _DECODER.decode(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments


def _of_python(text: str) -> Iterator[ToolCall]:
    """Yield the calls in lines of Python, whose arguments must be literals given by name."""
    for line in ast.parse(text.strip()).body:
        match line:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[], keywords=keys)) if all(k.arg for k in keys):
                yield name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keys}
            case _:
                yield "", f"{ast.unparse(line)[:200]} is not a call of a tool with arguments by name"


def _call(named: Mapping[str, Callable[..., Any]], name: str, arguments: Mapping[str, Any] | str) -> str:
    """Execute a tool call, and return its result or "error: ..."."""
    if isinstance(arguments, str):
        return f"error: {arguments}"
    if name not in named:
        return f"error: there is no tool {name!r}; there are {', '.join(named)}"
    try:
        returned = named[name](**_converted(named[name], arguments))
        return str(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
    except _WrongTypeError as error:
        return f"error: {error}"
    except Exception as error:  # a wrong call is a mistake of the model, which sees the error as an observation
        return f"error: {type(error).__name__}: {error}"


class _WrongTypeError(ValueError):
    """A JSON value is not of the annotated type."""


def _converted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the types of the function's annotations; other arguments stay as they are.

    Raises:
        _WrongTypeError: an argument cannot be converted without loss.
    """
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # a function in C may have no signature, and evaluating a type hint runs the user's code
        return dict(arguments)
    converted: dict[str, Any] = {}
    for key, value in arguments.items():
        hint = parameters[key].annotation if key in parameters else inspect.Parameter.empty
        try:
            converted[key] = value if hint is inspect.Parameter.empty else _exact(value, hint)
        except ValueError:
            raise _WrongTypeError(f"{key} must be {_in_words(shape(hint))}") from None
    return converted


def _exact(value: Any, hint: Any) -> Any:
    """Return a JSON value as a type, also from its text ("40" as 40); raise ValueError if it is of another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _exact(value, inner[0])
    if origin in (Union, UnionType):
        # A member that takes the value as it is comes first: "40" stays a text in `int | str`.
        for member in (*(kind for kind in inner if _is_exact(value, kind)), *inner):
            with suppress(ValueError):
                return _exact(value, member)
        raise ValueError
    if origin is Literal:
        choices = [item for item in inner if type(item) is type(value) and item == value]
        # The choice itself comes first: "1" is the text of `Literal[1, "1"]` and not its number.
        choices += [item for item in inner if isinstance(value, str) and str(item) == value]
        if not choices:
            raise ValueError
        return choices[0]
    kind = shape(hint).get("type")
    if isinstance(value, str) and kind not in (None, "string"):
        # Models write Python's constants where JSON's belong.
        value = json.loads(value if value not in ("True", "False", "None") else value.lower().replace("none", "null"))
    return _of_kind(value, kind, origin or hint, inner)


def _is_exact(value: Any, hint: Any) -> bool:
    with suppress(ValueError):
        converted = _exact(value, hint)
        return type(converted) is type(value) and converted == value
    return False


def _of_kind(value: Any, kind: str | None, cls: Any, inner: tuple[Any, ...]) -> Any:
    """Return a parsed value as the type `cls`, whose JSON type is `kind`; `inner` are the types of its members."""
    # Python's bool is an int.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match kind:
        case "integer" if number and (isinstance(value, int) or value.is_integer()):
            return int(value)
        case "number" if number:
            return float(value)
        case "string" if isinstance(value, str) or number:
            # A model often writes 42 for a text of digits.
            return value if isinstance(value, str) else json.dumps(value)
        case "boolean" if isinstance(value, bool):
            return value
        case "null" if value is None:
            return None
        case "array" if isinstance(value, list):
            items = cast("list[Any]", value)
            fixed = cls is tuple and inner and inner[-1] is not Ellipsis
            hints = inner if fixed else inner[:1] * len(items)
            members = [_exact(item, hint) for item, hint in zip(items, hints, strict=True)] if inner else items
            return tuple(members) if cls is tuple else members
        case "object" if isinstance(value, dict):
            return {key: _exact(v, inner[-1]) if inner else v for key, v in cast("dict[str, Any]", value).items()}
        case None:
            return value
        case _:
            raise ValueError


def _in_words(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema's type in words, such as "an integer or null"."""
    if "enum" in schema:
        return f"one of {json.dumps(schema['enum'])[1:-1]}"
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    name = str(schema.get("type", "another value"))
    within = schema.get("items", schema.get("additionalProperties"))
    article = "" if name == "null" else "an " if name[0] in "aio" else "a "
    return f"{article}{name}{f' whose members are each {_in_words(within)}' if within else ''}"


def _name(path: str) -> str:
    """Return the last part of a dotted path."""
    return path.replace(":", ".").rpartition(".")[2]


@cache
def load_object(path: str) -> Callable[..., Any]:
    """Import the object of a dotted path."""
    module, _, name = path.replace(":", ".").rpartition(".")
    return getattr(importlib.import_module(module), name)
