"""The blocks of docs/*.md that repeat the code: tables of keys, commands, metrics, findings, formulas, exit codes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import click
from typer.main import get_command

from docs.docstrings import meanings_of, toml
from docs.measure import ROOT
from retrain.campaign.plan.campaign_schema import Campaign
from retrain.cli.main import app, command_names, summary
from retrain.config.presets import FOLDER, preset_names
from retrain.config.schema import Config
from retrain.errors import RetrainError
from retrain.metrics import metrics
from retrain.registry import components, find

LONG = 44
"""Longest default that a table shows."""


def lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; a pipe in a cell would end the cell."""
    body = ("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body])


def keys(table: str, *chosen: str) -> str:
    """Keys of a section of the configuration, or of the components that read a table: default and meaning."""
    entries = {key: entry for key, entry in entries_of(table).items() if not chosen or key in chosen}
    entries = {key: entries[key] for key in chosen} if chosen else entries
    grouped: dict[str, list[tuple[str, str]]] = {}
    for key, (default, meaning) in entries.items():
        grouped.setdefault(meaning, []).append((key, default))
    rows = (
        (", ".join(f"`{key}`" for key, _ in same), ", ".join(dict.fromkeys(value for _, value in same)), meaning)
        for meaning, same in grouped.items()
    )
    return lines((f"`[{table}]`", "default", "meaning"), rows)


def entries_of(table: str) -> Mapping[str, tuple[str, str]]:
    """Key -> (default, meaning), required keys first."""
    found: dict[str, tuple[str, str]] = {}
    for model, meanings in models(table):
        schema = model.model_json_schema()
        required = schema.get("required", ())
        properties: Mapping[str, Any] = schema.get("properties", {})
        for key, entry in sorted(properties.items(), key=lambda item: item[0] not in required):
            meaning = " ".join(str(entry.get("description") or meanings.get(key, "")).split())
            found.setdefault(key, (shown(key in required, entry.get("default")), meaning.rstrip(".")))
    return found


def shown(is_required: bool, default: Any) -> str:
    """A default as the file would have it."""
    text = "required" if is_required else "unset" if default is None else f"`{toml(default)}`"
    return text if len(text) < LONG and "\n" not in text else "see the reference"


def models(table: str) -> Iterator[tuple[Any, Mapping[str, str]]]:
    """The models of a table with the meanings of their keys: a section, or the components that read it."""
    model: Any = Campaign if table == "campaign" else Config
    for name in () if table == "campaign" else table.split("."):
        field = model.model_fields.get(name)
        parts = () if field is None else (field.annotation, *getattr(field.annotation, "__args__", ()))
        model = next((part for part in parts if hasattr(part, "model_fields")), None)
        if model is None:
            break
    if model is not None:
        yield model, {}
    for part in components():
        if part.table == table and model is None:
            yield part.schema, meanings_of(part.target)


def commands() -> str:
    """Every command with its line in `retrain --help`."""
    group: Any = get_command(app)
    return lines(("command", "purpose"), ((f"`retrain {usage}`", purpose) for usage, purpose in _commands(group)))


def _commands(group: Any) -> Iterator[tuple[str, str]]:
    context = click.Context(group, info_name="retrain")
    for name in command_names():
        command: Any = group
        for word in name.split():
            command = command.get_command(context, word)
        named = [part for part in command.params if part.param_type_name == "argument"]
        arguments = " ".join(part.metavar or part.name.upper() for part in named)
        yield f"{name} {arguments}".strip(), summary(name)


def metrics_table(group: str, *components: str) -> str:
    """The metrics of a group: "first" with how to read them, or one of metrics.toml, or those of some components."""
    every = metrics().values()
    if group == "first":
        chosen = [metric for metric in every if metric.first]
    elif group == "of":
        chosen = [metric for metric in every if {*metric.uses} & {*components}]
    else:
        chosen = [metric for metric in every if metric.group == group and not metric.first]
    grouped: dict[tuple[str, str], list[str]] = {}
    for metric in chosen:
        grouped.setdefault((_meaning(metric), metric.reading), []).append(metric.name)
    rows = ((", ".join(f"`{name}`" for name in names), text, reading) for (text, reading), names in grouped.items())
    if group in ("first", "of") and any(reading for _, reading in grouped):
        return lines(("metric", "meaning", "how to read it"), rows)
    return lines(("metric", "meaning"), (row[:2] for row in rows))


def _meaning(metric: Any) -> str:
    unit = "" if metric.unit in ("", "share", "tokens", "s") else f", in {metric.unit}"
    return metric.meaning + unit + (f"; {metric.when}" if metric.when else "")


def exit_codes() -> str:
    """Exit codes with the first line of the class that ends a command with each."""
    texts = {0: "Done.", 130: "Ctrl-C; after the first one it has saved."}
    for error in errors_of(RetrainError):
        if "exit_code" in vars(error):
            text = inspect.cleandoc(error.__doc__ or "").splitlines()[0]
            texts.setdefault(error.exit_code, re.sub(r" \(exit.*?\)", "", text))
    return lines(("code", "meaning"), ((str(code), texts[code].rstrip(".")) for code in sorted(texts)))


def errors_of(base: type[RetrainError]) -> Iterator[type[RetrainError]]:
    """The classes below an error that retrain itself defines, nearest first."""
    for error in base.__subclasses__():
        if error.__module__ == "retrain.errors":
            yield error
            yield from errors_of(error)


def presets() -> str:
    """Presets with the first line of their files."""
    return lines(
        ("preset", "algorithm"), ((f"`{name}`", _first_comment(FOLDER / f"{name}.toml")) for name in preset_names())
    )


def recipes(folder: str = "") -> str:
    """Recipes of configs/ or a folder of it with the first line of each."""
    files = sorted((ROOT / "configs" / folder).glob("*.toml"))
    return lines(("recipe", "trains"), ((f"`{file.relative_to(ROOT)}`", _first_comment(file)) for file in files))


def _first_comment(file: Path) -> str:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    return first.lstrip("# ").rstrip(".")


def formulas(*names: str) -> str:
    """Components, each as KIND.NAME, with the first formula and the paper of their docstrings."""
    return lines(("component", "formula", "paper"), (_formula(*name.split(".")) for name in names))


def _formula(kind: str, name: str) -> tuple[str, str, str]:
    text = inspect.cleandoc(find(kind, name).target.__doc__ or "")
    formula = text.split("\n\n")[1].splitlines()[0].strip().rstrip(",")
    cited = re.search(r"References?: (?:.*?, )??([^,]*), arXiv:(\d{4}\.\d{5})", " ".join(text.split()))
    paper = f"[{cited[1]}](https://arxiv.org/abs/{cited[2]})" if cited else ""
    return f"{kind} `{name}`", f"<code>{escape(formula)}</code>", paper


WRITERS: Mapping[str, Callable[..., str]] = {
    "keys": keys,
    "commands": commands,
    "metrics": metrics_table,
    "exit-codes": exit_codes,
    "presets": presets,
    "recipes": recipes,
    "formulas": formulas,
}
