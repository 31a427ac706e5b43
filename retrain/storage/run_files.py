"""Read the files of a run. A kill or a power cut may have damaged any of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.errors import ConfigError, ConfigProblem
from retrain.system.files import read_plain
from retrain.system.records import checked, damaged, parse_json

Row = dict[str, Any]

_FREE = (
    "logging",
    "checkpoint",
    "distributed",
    "eval.store",
    "components.tracker",
    "reward_pool.sandbox",
    "reward_pool.env",
    "reward_pool.readable",
)
_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
_Figure = Annotated[float, Field(strict=True)] | _Integer | None


def _has_step(row: Row) -> Row:
    if not isinstance(row.get("step"), int) or row["step"] < 0:
        raise ValueError('"step" is not a count of steps')
    return row


class _Rollout(TypedDict):
    """Fields that every reader of stored rollouts needs."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    group: _Integer
    prompt: Any
    text: str
    reward: float | None
    completion_ids: list[_Integer]
    tokens: NotRequired[list[str] | None]
    advantages: NotRequired[list[float] | None]
    planning: NotRequired[list[_Integer] | None]
    sampler_logprobs: NotRequired[list[float] | None]


class _Answered(TypedDict):
    """A held-out problem with its completions."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    prompt: Any
    ground_truth: Any
    predictions: list[str]
    lengths: list[_Integer]
    correct: list[bool]


_EVALUATED: TypeAdapter[Any] = TypeAdapter(_Answered)
_MEASURED: TypeAdapter[Any] = TypeAdapter(Annotated[dict[str, _Figure], AfterValidator(_has_step)])
_ROLLOUT: TypeAdapter[Any] = TypeAdapter(_Rollout)


@contextmanager
def understood(place: Path) -> Generator[None]:
    """Turn any error from unexpected values read at `place` into a StorageError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        text = " ".join(str(error).split())[:300]
        raise damaged(f"{place}: not as a run writes it", TypeError(f"{type(error).__name__}: {text}")) from error


def read_rows(path: Path) -> list[Row]:
    """The complete rows of metrics.jsonl, eval.jsonl or a file of rollouts; none if there is no such file.

    A last line that a kill cut off is left out.

    Raises:
        StorageError: a row is invalid; the message names file and line.
    """
    return [parse_row(line, path, number) for number, line in enumerate(_lines(path), 1)]


def read_evaluation(path: Path) -> list[Row]:
    """The rows of a file of eval/; raises as `read_rows` does."""
    return [parse_row(line, path, number, _EVALUATED) for number, line in enumerate(_lines(path), 1)]


def _lines(path: Path) -> list[bytes]:
    """The complete lines of a file; none if there is no such file."""
    try:
        data = read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(str(path), error) from error
    return data.split(b"\n")[:-1]


def parse_row(line: bytes, path: Path, number: int, schema: TypeAdapter[Any] | None = None) -> Row:
    """Parse line `number` of the file; StorageError if it is invalid.

    Args:
        schema: of the row; None: that of a file of rollouts, or of metrics.jsonl and eval.jsonl.
    """
    try:
        return checked(schema or (_ROLLOUT if path.suffix == ".gz" else _MEASURED), parse_json(line))
    except ValueError as error:
        raise damaged(f"{path}:{number}", error) from error


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """Lines `key: old -> new` of the changes between two resolved configurations.

    Sections about where files go may always change: they do not affect the weights.

    Args:
        allowed: dotted keys that may change; a table's name allows everything in it.

    Raises:
        ConfigError: other keys differ; each is listed with both values.
    """
    before, after = dict(flatten(old)), dict(flatten(new))
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    lines = {key: f"{json.dumps(before.get(key))} -> {json.dumps(after.get(key))}" for key in changed}
    free = (*allowed, *_FREE)
    refused = [key for key in changed if not any(f"{key}.".startswith(f"{prefix}.") for prefix in free)]
    if refused:
        texts = {key: f"differs from the run to be resumed: {lines[key]}" for key in refused}
        fix = "--allow-change {}, or change it back"
        raise ConfigError([ConfigProblem("--resume", 0, 0, key, texts[key], fix.format(key)) for key in refused])
    return [f"{key}: {lines[key]}" for key in changed]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; lists of tables by index, other lists as one value, empty tables as nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
