"""The registry is open: what runs components knows none of them by name, and a new one is one file."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import retrain
from retrain import registry
from retrain.registry import component, lookup
from retrain.registry.built_in import BUILT_IN, TABLES
from tests.commands import invoke as cli
from tests.forks import run_command

ROOT = Path(__file__).parents[2]
PACKAGES = ("run", "campaign", "config", "registry", "algorithms/graph")
MODULES = [file for package in PACKAGES for file in sorted((ROOT / "retrain" / package).rglob("*.py"))]

OTHER_MEANINGS = {
    "exact": "what an engine's traits say of its log-probs",
    "format": "version of a checkpoint's manifest",
    "dir": "[logging] dir",
    "replay": "what an environment's traits say of its episodes",
    "expert": "rows to imitate: the section [expert], a trait of losses and sources, and a key of old checkpoints",
}
"""Words that are names of components or their tables, and have another meaning in these packages."""

CONTRACT = "fields of TransformContext, which plug-ins of users read by these names: a context cannot do without them"
EXCEPTIONS = {
    "built_in": (None, "the table of the package's own components"),
    "plan_file": ({"grid"}, "the key [campaign] grid"),
    "plain_functions": ({"sepa_lambda"}, CONTRACT),
    "compose": (
        {"planning_mask", "sepa_lambda", "none"},
        "arguments of compute_composable_advantages, a documented call; it returns every group, so its filter is none",
    ),
    "schema": ({"none", "uninformative"}, "values of [rollout] resample"),
    "conditions": ({"none"}, "a value of [algorithm] transform_mode that a label leaves out"),
    "results_file": ({"none"}, "a blank cell in a table of another program"),
    "verdict_page": ({"planning"}, "area of the metrics that a chart shows"),
}
"""Module -> the names that it may decide by, and why."""

LOOK_UPS = ("get", "pop", "setdefault", "startswith", "named", "find", "bind", "signal")


def decisions(tree):
    """Every string constant that is compared, matched, iterated over, looked up or a key to look up by, or a constant
    of the module, which is given a name to do the same."""
    constants = [one.value for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign)]
    for node in ast.walk(tree):
        for part in [node] if node in constants or isinstance(node, ast.Set) else _deciding(node):
            inside = part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
            yield from (one.value for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _deciding(node):
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.MatchValue():
            return [node.value]
        case ast.Subscript():
            return [node.slice]
        case ast.Dict():
            return [key for key in node.keys if key is not None]
        case ast.For() | ast.comprehension():
            return [node.iter]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in LOOK_UPS:
            return node.args[:2]
    return []


@pytest.mark.repository
@pytest.mark.parametrize("file", MODULES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_nothing_is_decided_by_the_name_of_a_component(file):
    built_in = [one for one in registry.components() if one.source == "built-in"]
    known = {name for one in built_in for name in (one.name, one.table)} - OTHER_MEANINGS.keys()
    allowed, _ = EXCEPTIONS.get(file.stem, (set(), ""))
    if allowed is None:
        return
    assert {word for word in decisions(ast.parse(file.read_text())) if word in known} == allowed


FILE = """
from retrain import advantage, filter, loss, signal, transform

@advantage("share")
def share(rewards, group_ids, *, scale: float = 2.0):
    return scale * (1 + rewards)

@signal("seen")
class Seen:
    def __init__(self, seed, *, start: int = 5):
        self.rows = start

    def __call__(self, rewards):
        return self.rows, {"seen/rows": float(self.rows)}

    def before(self, batch):
        return {}

    def after(self, batch):
        self.rows += len(batch.rewards)
        return {"seen/after": float(self.rows)}

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]

@transform("damped")
def damped(advantages, seen, *, by: float = 0.5):
    return advantages * by / seen

@filter("first_group")
def first_group(group_ids, *, most: int = 0):
    return group_ids <= most

@loss("push", vanishes=True)
def push(logprobs, advantages, response_mask, *, power: float = 1.0):
    return (-logprobs * advantages).where(response_mask, 0.0)
"""
OWN = """
algorithm = { advantage_mode = "share", transform_mode = ["damped"], filter = "first_group" }
share = { scale = 3.0 }
seen = { start = 10 }
damped = { by = 0.25 }
push = { power = 2.0 }
[[loss]]
name = "push"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one file of components, made known as an installed package makes its own known."""
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    registry.components()  # loads what is built in, so that it is in what is put back
    monkeypatch.setattr(component, "REGISTERED", known := dict(component.REGISTERED))
    monkeypatch.setattr(lookup, "REGISTERED", known)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("own")
    (tmp_path / "run.toml").write_text(OWN)
    return tmp_path


@pytest.mark.slow
def test_a_method_of_ones_own_is_one_file(folder):
    listed = {(row["kind"], row["name"]) for row in json.loads(cli("plugins", "--json").stdout)}
    own = {("advantage", "share"), ("signal", "seen"), ("transform", "damped"), ("filter", "first_group")}
    assert own | {("loss", "push")} <= listed
    tables = json.loads(cli("schema").stdout)["properties"]
    assert {"share", "seen", "damped", "first_group", "push"} <= tables.keys()
    explained = json.loads(cli("explain", "run.toml", "--json").stdout)
    stages = {stage.get("signal") or stage.get("name") for stage in explained["pipeline"]["stages"]}
    assert stages >= {"seen"}
    assert explained["probe"]["credit and loss"].startswith("ok")
    wrong = cli("validate", "run.toml", "--set", "damped.bye=1", code=2)
    assert 'did you mean "by"?' in wrong.stderr


CHECKED = """
from retrain import Finding, filter

def check(params, config):
    if params["most"] > 9:
        raise KeyError("nine")
    if params["most"] >= config.training.batch_size:
        yield Finding(("most",), "keeps every group", "lower it", fatal=params["most"] > 7)

@filter("at_most", check=check)
def at_most(group_ids, *, most: int = 0):
    return group_ids <= most
"""


@pytest.mark.parametrize("name", ["at_most", "checked.at_most"])
def test_a_component_of_ones_own_is_checked_against_the_run(folder, name):
    (folder / "checked.py").write_text(CHECKED)
    if name == "at_most":
        importlib.import_module("checked")
    text = f'[training]\nbatch_size = 2\n[algorithm]\nfilter = "{name}"\n[at_most]\n'
    results: list[tuple[int, str]] = []
    for most in (1, 2, 8, 10):
        (folder / "run.toml").write_text(f"{text}most = {most}\n")
        result = cli("validate", "run.toml")
        results.append((result.exit_code, result.stderr))
    says = "run.toml:6:1: [at_most] most: keeps every group; lower it\n"
    assert results[:3] == [(0, ""), (0, f"warning: {says}"), (2, says)]
    assert results[3][0] == 1
    assert "raised KeyError: 'nine'" in results[3][1]


@pytest.mark.slow
def test_it_trains_and_its_state_is_resumed(folder):
    sizes = [
        "training.batch_size=2",
        "training.group_size=2",
        "training.max_tokens=4",
        "warmup.steps=0",
        "eval.problems=0",
    ]
    options = [text for size in (*sizes, "reward_pool.workers=0") for text in ("--set", size)]
    assert cli("train", "run.toml", "--plain", *options, "--set", "training.max_steps=1").exit_code == 0
    more = ("--resume", "auto", "--allow-change", "training.max_steps", "--set", "training.max_steps=2")
    assert cli("train", "run.toml", "--plain", *options, *more).exit_code == 0
    steps = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    counts = [(step["seen/rows"], step["seen/after"]) for step in steps]
    assert counts == [(10, 12), (12, 14)], "one group of two is kept"
    assert all("loss/push" in step for step in steps)


TAKEN = """
import retrain

@retrain.engine("vllm")
class Mine(retrain.protocols.Sampler):
    def sample(self, requests, sampling): ...
    def load_weights(self, weights, version): ...

def share(rewards):
    return rewards
"""


def test_the_table_of_built_in_components_is_that_of_the_decorators():
    entered = {(kind, name) for kind, points in lookup._entry_points().items() for name in points}
    every = [one for one in registry.components() if one.source == "built-in"]
    built_in = [one for one in every if (one.kind, one.name) not in entered]
    tables: dict[str, dict[str, str]] = {}
    for one in built_in:
        if one.table != one.name:
            tables.setdefault(one.kind, {})[one.name] = one.table
    places = {(one.kind, one.name): f"{one.target.__module__}:{one.target.__qualname__}" for one in built_in}
    assert places == {(kind, name): place for kind, rows in BUILT_IN.items() for name, place in rows.items()}
    assert tables == TABLES


DECORATORS = re.compile(rf'^@({"|".join(registry.KINDS)})\(\s*"([^"]+)"', re.MULTILINE)


def test_every_decorated_component_of_the_package_has_a_row():
    """A module that nothing imports would not show in the registry."""
    files = [file for file in sorted((ROOT / "retrain").rglob("*.py")) if "lab" not in file.parts]
    decorated = {found for file in files for found in DECORATORS.findall(file.read_text())}
    rows = {(kind, name) for kind, names in BUILT_IN.items() for name in names}
    assert not decorated - rows, "add these rows to retrain/registry/built_in.py"
    assert not rows - decorated, "remove these rows from retrain/registry/built_in.py"


def test_a_table_imports_the_components_that_read_it_alone(tmp_path):
    code = (
        "import sys\nfrom retrain import registry\n"
        "assert [one.name for one in registry.components(tables=['gtpo'])] == ['gtpo']\n"
        "assert 'retrain.data.rows' not in sys.modules and 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_name_of_a_component_that_the_run_does_not_use_is_taken_too(tmp_path):
    (tmp_path / "own.py").write_text(TAKEN)
    (tmp_path / "run.toml").write_text("[algorithm]\nadvantage_mode = 'own.share'\n")
    done = run_command("validate", "run.toml", cwd=tmp_path, code=2)
    assert "engine 'vllm' is registered twice" in done.stderr


def test_every_kind_is_a_public_decorator():
    assert all(getattr(retrain, name) is kind is getattr(registry, name) for name, kind in registry.KINDS.items())


@pytest.mark.parametrize(
    ("kind", "name", "key"), [("reward", "mean", 'rewards=[{name="mean"}]'), ("loss", "total", 'loss=[{name="total"}]')]
)
def test_a_name_under_which_the_run_reports_its_own_figures_is_refused(folder, kind, name, key):
    column = {"reward": "completion", "loss": "logprobs"}[kind]
    (folder / f"taken_{name}.py").write_text(
        f"from retrain import {kind}\n\n@{kind}('{name}')\ndef fn({column}):\n    return 1.0\n"
    )
    importlib.import_module(f"taken_{name}")
    result = cli("validate", "run.toml", "--set", key, code=2)
    assert f"the run reports {kind}/{name} itself; give the {kind} another name" in result.stderr
