"""What the documentation says can be done: its TOML is valid, its Python runs, its commands and keys exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from docs.measure import modules
from retrain.campaign.plan.campaign_schema import Campaign, ConditionEntry
from retrain.campaign.plan.load_campaign import load_campaign
from retrain.cli.main import command_names
from retrain.config.load import load
from retrain.config.mistakes import translated
from retrain.config.schema import Config
from retrain.metrics import find_metric, metrics
from retrain.registry import components
from tests.campaign.tables import write_campaign
from tests.forks import run_command, run_source

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)


def blocks(*languages):
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", page.read_text(), re.S))
        if not block.startswith("[project.")  # of the reader's own pyproject.toml
    ]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("block", blocks("toml"))
def test_configurations_are_valid(block, tmp_path):
    file = tmp_path / "block.toml"
    rows = tmp_path / "rows.jsonl"  # files of problems are the reader's
    rows.write_text('{"prompt": "1+1=", "question": "1+1=", "answer": "2", "solution": "2", "difficulty": 0.5}')
    block = re.sub(r'(?<=path = ")[\w/]+\.jsonl', lambda name: name[0] if Path(name[0]).exists() else str(rows), block)
    file.write_text(block.replace('"../configs/', f'"{ROOT}/configs/'))
    for name in ("base.toml", "run.toml"):  # what a file of the documentation extends
        (tmp_path / name).touch()
    for code, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", TEXT, re.DOTALL):
        (tmp_path / name).write_text(code)  # the reader's own modules, which the pages show
    overrides = [f'plugins.search_paths=["plugins", "{tmp_path}"]']
    if 'engine = "vllm"' in block and importlib.util.find_spec("vllm") is None:
        overrides.append("rollout.engine=auto")
    if 'name = "hub"' in block and importlib.util.find_spec("datasets") is None:
        overrides.append("task.name=addition")
    if '"builtin:smollm2"' in block:
        overrides.append("model.path=builtin:tiny")  # the real one is a download
    if 'executor = "ray"' in block and importlib.util.find_spec("ray") is None:
        overrides.append("campaign.executor=local")
    if "[campaign]" in block:
        assert not load_campaign(file, overrides).warnings
    else:
        load(file, overrides)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path):
    if "trl" in code:
        pytest.skip("a part of a program that trains for long; tests/adapters runs the like")
    if "retrain.train(" in code or "retrain.run_campaign(" in code:
        pytest.skip("tests/docs/test_from_python.py runs it")
    finished = tmp_path / "runs" / "quickstart"
    finished.mkdir(parents=True)
    (finished / "eval.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n')
    if "runs/ladder" in code:
        write_campaign(tmp_path / "runs" / "ladder", seeds=range(3))
    run_source(code, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, code=0)  # for plugins/, as in a clone


def test_every_command_is_in_the_table_of_commands():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in command_names() if f"`retrain {name}" not in page] == []


def keys(table):
    """Keys of a section of the configuration, or of the components that read a table."""
    if table == "campaign":
        return {*Campaign.model_fields, *ConditionEntry.model_fields}
    found = {key for part in components() if part.table == table for key in part.schema.model_fields}
    model = Config
    for name in table.split("."):
        field = model.model_fields.get(name) if model is not None else None
        model = section(field.annotation) if field is not None else None
    return found | set(model.model_fields if model is not None else ())


def section(annotation):
    """The model of a section in `Section`, `Section | None` or a tuple of sections."""
    parts = [annotation, *getattr(annotation, "__args__", ())]
    return next((part for part in parts if hasattr(part, "model_fields")), None)


NAMED = sorted(set(re.findall(r"`\[+([a-z_.]+)\]+ ([a-z_]+)", PROSE)))
ALIASES = {("training", "lr"), ("hicra", "strategic_grams_path"), ("hicra", "strategic_grams")}


@pytest.mark.parametrize(("table", "key"), NAMED)
def test_keys_in_the_text_exist(table, key):
    assert (table, key) in ALIASES or key in keys(table)


def tables(head):
    """First cells of the tables whose first column is called so, with the name of the column."""
    for found in re.finditer(rf"^\| ({head}) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE):
        for row in found[2].splitlines():
            for name in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
                yield found[1], name


@pytest.mark.parametrize(("head", "key"), sorted(set(tables(r"`\[[a-z_]+\]`"))))
def test_tables_of_options_name_keys(head, key):
    assert key in keys(head.strip("`[]"))


def written(tree):
    """The names that code gives what it puts into a dict, as regular expressions: keys, and texts that become keys."""
    for node in ast.walk(tree):
        for text in _named(node):
            match text:
                case ast.Constant(str(word)):
                    yield re.escape(word)
                case ast.JoinedStr([ast.Constant(str(area)), *rest]) if area.endswith("/"):
                    yield re.escape(area) + "".join(map(_form, rest))
                case ast.JoinedStr([ast.FormattedValue(), ast.Constant(str(name)), *rest]) if re.match(r"/\w", name):
                    yield r"\w+" + re.escape(name) + "".join(map(_form, rest))


def _form(part):
    return re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+"


def _named(node):
    match node:
        case ast.Dict():
            return [*node.keys, *node.values]
        case ast.DictComp():
            return [node.key]
        case ast.Subscript(ctx=ast.Store()):
            return [node.slice]
        case ast.Return():
            return ast.walk(node)
    return []


WRITTEN = "|".join(
    {
        form
        for module in modules()
        if module.name != "retrain.registry.built_in"  # its keys are names of components
        for form in written(module.tree)
    }
)


@pytest.mark.parametrize("name", sorted({name for _, name in tables("metric")} - metrics().keys()))
def test_tables_of_metrics_name_those_of_the_registry(name):
    assert find_metric(name)


COMPOSED = {"env/{metric}", "task/{label}/{figure}", "sepa/{group}_entropy_{figure}"}
"""Metrics whose names no single expression makes."""


@pytest.mark.parametrize("name", sorted(metrics().keys() - COMPOSED))
def test_the_registry_of_metrics_names_what_is_written(name):
    assert re.fullmatch(WRITTEN, re.sub(r"\{\w+\}", "x", name))


@pytest.mark.parametrize("name", ["prm/lost", "reward/mean/x", "sepa/", "kl"])
def test_a_metric_that_nothing_writes_would_be_noticed(name):
    assert not re.fullmatch(WRITTEN, name)


def words_of_others():
    """(word, what the row says) of the table for people who come from verl; test_from_trl.py tries the others."""
    for page in PAGES:
        for row in re.findall(r"^\| (`.*)\|$", page.read_text() if page.stem == "from-verl" else "", re.MULTILINE):
            words, says = row.split(" | ", 1)
            yield from ((word, says) for word in re.findall(r"`(\w+)`", words))


@pytest.mark.parametrize(("word", "says"), words_of_others())
def test_pages_for_newcomers_say_what_validate_says(word, says):
    """A key that the answer names stands in the row."""
    keys = re.findall(r"\[+[\w.]+\]+ \w+", translated(word, 2))
    assert any(key in says for key in keys) or (keys and "[[rewards]]" in says)


def printed_after(command):
    """The block of docs/tools.md behind the block with this command."""
    (output,) = re.findall(rf"{re.escape(command)}\n```\n\n```\n(.*?)```", (ROOT / "docs/tools.md").read_text(), re.S)
    return output.splitlines()


def test_verify_prints_what_the_documentation_shows(tmp_path):
    def claims(lines):  # the figures are rounding errors, which differ between machines
        return [re.sub(r" +\d\.\d\de[+-]\d\d ", " ", line) for line in lines]

    done = run_command("verify", "--trials", "2", cwd=tmp_path)
    shown = claims(printed_after("retrain verify"))
    assert len(shown) > 2
    assert set(shown) <= {*claims(done.stdout.splitlines())}


def test_credit_prints_what_the_documentation_shows(tmp_path):
    (groups,) = re.findall(r"```json\n(\{\"group\".*?)```", (ROOT / "docs/tools.md").read_text(), re.S)
    (tmp_path / "groups.jsonl").write_text(groups)
    modes = "--mode dca --mode grpo_lp --mode grpo_std --set grpo_lp.gamma=1e-3"
    command = f"retrain credit groups.jsonl {modes} --plot credit.html"
    lines = run_command(*command.split()[1:], cwd=tmp_path).stdout.splitlines()
    assert printed_after(command) == [line for line in lines if not line.startswith("credit.html")]
