"""Write docs/reference/* from the code: configuration from the schema, components from their docstrings, pictures.

`python -m docs.generate`, from the root of the repository. It also rewrites the blocks of docs/*.md that repeat the
code, between `<!-- generated: NAME WORDS -->` and `<!-- end -->`; GitHub shows these, so they are committed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.blocks import WRITERS, metrics_table
from docs.docstrings import meanings_of, sentence, toml
from docs.measure import ROOT
from docs.pictures import layers_picture, step_picture, step_stops
from retrain.campaign.plan.campaign_schema import Campaign
from retrain.config.document import show
from retrain.config.schema import Config
from retrain.registry import KINDS, Component, components
from retrain.registry.built_in import ALIASES

_GROUPS = ("rollouts", "update", "engine", "components")
HEADER = "| key | type | default | meaning |\n|---|---|---|---|\n"


def configuration_page() -> str:
    """Every section, key, type, default and meaning, and the tables of the built-in components."""
    schema = Config.model_json_schema()
    definitions: Mapping[str, Any] = schema["$defs"]
    parts = [
        "# Configuration reference\n",
        "Made from the schema that checks your file. Unknown keys are mistakes; so are wrong types and bounds.\n",
    ]
    for section, entry in schema["properties"].items():
        parts += list(section_tables(section, entry, definitions))
    campaign = Campaign.model_json_schema()
    parts += list(section_tables("campaign", {"$ref": "Campaign"}, campaign["$defs"] | {"Campaign": campaign}))
    parts.append("## Other names\n\n| you may write | for |\n|---|---|")
    parts += [
        f"| `[{'.'.join(map(str, old[:-1]))}] {old[-1]}` | `[{'.'.join(new[:-1])}] {new[-1]}` |"
        for old, new in ALIASES.items()
    ]
    parts.append("\n## Tables of components\n\nA component reads the table of its name, and only if it is used.\n")
    parts += [f"### `[{part.table}]`: {part.kind} `{part.name}`\n\n{table(part)}" for part in with_parameters()]
    return "\n".join(parts)


def section_tables(path: str, entry: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """The table of a section, then those of the sections in it."""
    many, reference = find_reference(entry)
    definition = definitions[reference]
    title = f"[[{path}]]" if many else f"[{path}]"
    about = " ".join(str(definition.get("description", "")).split())
    yield (
        f"## `{title}`\n\n{sentence(about.removeprefix(f'`{title}`').lstrip(': '))}\n\n{HEADER}"
        + rows(definition)
        + "\n"
    )
    for key, inner in definition["properties"].items():
        if find_reference(inner)[1] in definitions:
            yield from section_tables(f"{path}.{key}", inner, definitions)


def find_reference(entry: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether it is a list of tables, name of the section's definition or "")."""
    for option in (entry, *entry.get("anyOf", ()), *entry.get("allOf", ())):
        if "$ref" in option:
            return False, option["$ref"].rpartition("/")[2]
        if "$ref" in option.get("items", {}):
            return True, option["items"]["$ref"].rpartition("/")[2]
    return False, ""


def table(part: Component) -> str:
    """The parameters of a component as a table, with their meanings from the docstring."""
    schema = part.schema.model_json_schema()
    meanings = {"weight": "Factor of the term in the loss; 0 leaves it out."} | meanings_of(part.target)
    for key, entry in schema.get("properties", {}).items():
        entry.setdefault("description", meanings.get(key, ""))
    return HEADER + rows(schema) + "\n"


def rows(definition: Mapping[str, Any]) -> str:
    """One row for each key of an object schema."""
    required = set(definition.get("required", ()))
    lines: list[str] = []
    entries: Mapping[str, Any] = definition.get("properties", {})
    for key, entry in sorted(entries.items(), key=lambda item: item[0] not in required):
        default = "required" if key in required else f"`{toml(entry.get('default'))}`"
        meaning = " ".join(str(entry.get("description", "")).split())
        lines.append(f"| `{key}` | {escape(kind(entry))} | {escape(default)} | {escape(meaning)} |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """A pipe would end the cell."""
    return text.replace("|", "\\|")


def kind(entry: Mapping[str, Any]) -> str:
    """Type and bounds of a key, in a few words."""
    if "$ref" in entry or "$ref" in entry.get("items", {}):
        return "table"
    if "anyOf" in entry:
        return " or ".join(kind(option) for option in entry["anyOf"] if option.get("type") != "null")
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{toml(value)}`" for value in entry.get("enum", [entry.get("const")]))
    if entry.get("type") == "array":
        return "list of " + kind(entry["items"]) if "items" in entry else "list"
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "table"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[key]:g}" for key, sign in signs.items() if key in entry and abs(entry[key]) < 1e18]
    return " ".join([names.get(str(entry.get("type")), "any"), ", ".join(bounds)]).strip()


def built_in(kind: str | None = None) -> list[Component]:
    """The components that come with the package, of one kind or of all."""
    return [part for part in components(kind) if part.source == "built-in"]


def with_parameters() -> list[Component]:
    """Built-in components that have any parameter, one for each table that is not a section."""
    return [part for part in built_in() if part.schema.model_fields and part.table not in Config.model_fields]


def components_page() -> str:
    """Every component with what it reads, its parameters, and its docstring."""
    parts = [
        "# Components\n",
        "Made from the docstrings. Each of these names can be replaced by a dotted path to your own.\n",
    ]
    for each in KINDS.values():
        if found := built_in(each.name):
            parts.append(f"## {each.name.capitalize()}{f': `{show(each.key)}`' if each.key else ''}\n\n{each.about}\n")
            parts += [component_text(part) for part in found]
    return "\n".join(parts)


def component_text(part: Component) -> str:
    """Heading, columns, parameters and docstring of one component."""
    first, _, rest = inspect.cleandoc(part.target.__doc__ or "").partition("\n")
    reads = f"Reads {', '.join(f'`{column}`' for column in part.reads)}.\n\n" if part.reads else ""
    parameters = f"Parameters, in `[{part.table}]`:\n\n{table(part)}\n" if part.schema.model_fields else ""
    body = f"```text\n{rest.strip()}\n```\n\n" if rest.strip() else ""
    return f"### `{part.name}`\n\n{first}\n\n{body}{reads}{parameters}"


def one_step() -> str:
    """The picture of the step that docs/architecture.md describes."""
    return step_picture(step_stops((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))


def metrics_page() -> str:
    """Every metric of a step."""
    parts = [
        "# Metrics\n",
        "Made from the registry that reports and checks read. A metric that does not apply is missing.\n",
    ]
    parts += [f"## {group.capitalize()}\n\n{metrics_table(group)}\n" for group in ("first", *_GROUPS)]
    return "\n".join(parts)


PAGES = {
    "configuration.md": configuration_page,
    "components.md": components_page,
    "metrics.md": metrics_page,
    "layers.svg": layers_picture,
    "step.svg": one_step,
}


BLOCK = re.compile(r"(<!-- generated: (\S+)(.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def rewritten(page: str) -> str:
    """The text of a page with its generated blocks as the code has them."""
    return BLOCK.sub(lambda found: f"{found[1]}{WRITERS[found[2]](*found[3].split()).strip()}\n{found[5]}", page)


def main(folder: Path = Path(__file__).parent / "reference") -> None:
    """Write the pages into `folder`, and the generated blocks of docs/*.md."""
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
    for file in sorted((ROOT / "docs").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
