"""Read the files of a run, each of which a kill or a power failure may have damaged."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.config.document import canonical
from retrain.errors import ConfigError, ConfigProblem
from retrain.system.files import read_plain
from retrain.system.records import checked, damaged, parse_json

Row = dict[str, Any]

_CHANGEABLE = ("logging", "checkpoint", "distributed", "rollout.in_flight", "components.tracker", "reward_pool.env")
"""Configuration keys that may change when a run is resumed: they affect the weights by timing alone, or not at all."""
_ANY = object()
_FORMER_KEYS: Mapping[str, Mapping[str, Any]] = {
    "rollout": {"top_p": _ANY, "top_k": _ANY, "drain_timeout_s": _ANY},
    "checkpoint": {"on_save_error": _ANY},
    "eval": {"store": _ANY},
    "eval.sets": {"top_p": None, "top_k": None},
    "stop_when": {"rows": 1},
    "warmup": {"cache": _ANY},
    "logging": {"metric_names": _ANY},
    "rewards": {"network": _ANY},
    "reward_pool": {"sandbox": _ANY, "readable": _ANY},
    "walks": {"p_astray": 0.6},
    "torch": {"graphs": _ANY},
    **{name: {"retries": _ANY, "health_every_s": _ANY} for name in ("vllm", "vllm-server")},
    "otb": {"zero_tail": True},
    "gtpo_paper": {"entropy_min": None, "entropy_max": None},
    "turn_returns": {"among": "reached"},
}
"""Table or component -> keys of earlier versions, each with the value that this version computes; `_ANY` if the key did
not affect the weights. A run with another value trained something else, so its key is refused as unknown."""
_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
_Number = Annotated[float, Field(strict=True)] | _Integer | None


def _has_step(row: Row) -> Row:
    if not isinstance(row.get("step"), int) or row["step"] < 0:
        raise ValueError('"step" is not an integer >= 0')
    return row


class _RolloutRow(TypedDict):
    """Required and optional fields of a stored rollout. Further fields are allowed."""

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


class _EvaluationRow(TypedDict):
    """Required fields of a stored held-out problem with its completions. Further fields are allowed."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    prompt: Any
    ground_truth: Any
    predictions: list[str]
    lengths: list[_Integer]
    correct: list[bool]


_EVALUATION_ROW: TypeAdapter[Any] = TypeAdapter(_EvaluationRow)
_METRICS_ROW: TypeAdapter[Any] = TypeAdapter(Annotated[dict[str, _Number], AfterValidator(_has_step)])
_ROLLOUT_ROW: TypeAdapter[Any] = TypeAdapter(_RolloutRow)


@contextmanager
def understood(path: Path) -> Generator[None]:
    """Convert exceptions that unexpected values in a file cause inside the block into a StorageError.

    Args:
        path: the file or folder, for the error.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        # An exception's text may have many lines, and an error is one.
        text = " ".join(str(error).split())[:300]
        raise damaged(f"{path}: not as a run writes it", TypeError(f"{type(error).__name__}: {text}")) from error


def read_rows(path: Path) -> list[Row]:
    """Read the complete rows of metrics.jsonl, eval.jsonl or a file of rollouts; [] if the file does not exist.

    An incomplete last line, which a kill leaves behind, is skipped.

    Raises:
        StorageError: a row is invalid; the message names file and line.
    """
    return [parse_row(line, path, number) for number, line in enumerate(_lines(path), 1)]


def read_evaluation(path: Path) -> list[Row]:
    """Read the rows of a file in eval/; [] if it does not exist. It raises the errors of `read_rows`."""
    return [parse_row(line, path, number, _EVALUATION_ROW) for number, line in enumerate(_lines(path), 1)]


def _lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file; [] if it does not exist."""
    try:
        data = read_plain(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(str(path), error) from error
    # What follows the last newline is the row that a kill interrupted.
    return data.split(b"\n")[:-1]


def parse_row(line: bytes, path: Path, number: int, schema: TypeAdapter[Any] | None = None) -> Row:
    """Parse and validate a line of a file.

    Args:
        line: the line.
        path: the file, for errors.
        number: number of the line, for errors.
        schema: type of the row. None selects that of rollouts if the file's name ends in .gz, else that of
            metrics.jsonl and eval.jsonl.
    Raises:
        StorageError: the line is invalid.
    """
    try:
        return checked(schema or (_ROLLOUT_ROW if path.suffix == ".gz" else _METRICS_ROW), parse_json(line))
    except ValueError as error:
        raise damaged(f"{path}:{number}", error) from error


def with_current_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration without keys that this version does not have."""
    # The caller compares it with the stored one, which must not change.
    current = copy.deepcopy(dict(config))
    sets = current.get("eval", {}).get("sets", ())
    named = (entry for entries in current.get("components", {}).values() for entry in entries)
    tables: list[tuple[str, Any]] = [
        *current.items(),
        ("stop_when", current.get("training", {}).get("stop_when")),
        *(("eval.sets", entry) for entry in sets),
        *(("rewards", reward) for entry in (current, *sets) for reward in entry.get("rewards") or ()),
        *((entry["name"], entry["params"]) for entry in named),
    ]
    for name, table in tables:
        for key, value in _FORMER_KEYS.get(name, {}).items() if isinstance(table, dict) else ():
            if value is _ANY or table.get(key, _ANY) == value:
                table.pop(key, None)
    return current


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """Return the changes between two resolved configurations as lines `key: old -> new`.

    The keys of `_CHANGEABLE`, such as those of `[logging]`, may always change.

    Args:
        old: configuration of the run that is resumed.
        new: the current configuration.
        allowed: dotted keys or aliases of keys that may change; the name of a table allows all of its keys.

    Raises:
        ConfigError: other keys differ; the error lists each with both values.
    """
    before = dict(flatten(old))
    after = dict(flatten(new))
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    lines = {key: f"{json.dumps(before.get(key))} -> {json.dumps(after.get(key))}" for key in changed}
    changeable = (*map(canonical, allowed), *_CHANGEABLE)
    refused = [key for key in changed if not any(f"{key}.".startswith(f"{prefix}.") for prefix in changeable)]
    if refused:
        texts = {key: f"differs from the run to be resumed: {lines[key]}" for key in refused}
        fix = "--allow-change {}, or change it back"
        raise ConfigError([ConfigProblem("--resume", 0, 0, key, texts[key], fix.format(key)) for key in refused])
    return [f"{key}: {lines[key]}" for key in changed]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a configuration with their dotted keys.

    The entries of a list of tables have their index in the key. Other lists are one value. Empty tables yield nothing.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
