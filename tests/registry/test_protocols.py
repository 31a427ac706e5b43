# pyright: reportAttributeAccessIssue=false
"""The protocols: what a class may leave out, what it must write, and that nothing looks for verbs by name."""

import ast
from pathlib import Path

import pytest

import retrain
from retrain.errors import ComponentError
from retrain.registry import KINDS, Component

SOURCES = sorted(Path(retrain.__file__).parent.rglob("*.py"))
PROTOCOLS = {kind.protocol for kind in KINDS.values() if kind.protocol}
VERBS = {name for protocol in PROTOCOLS for name in vars(protocol) if not name.startswith("_")}


class Bare:
    """An engine with what it must have, and a table."""

    def __init__(self, model, *, factor: int = 2):
        self.model, self.factor = model, factor

    def sample(self, prompts, sampling):
        return []

    def load_weights(self, weights, version):
        self.version = version


def build(kind, target, **table):
    return Component(kind, "mine", target, "mine", source="registered").bind(table).build({"model": "m"})


def test_a_class_gets_the_defaults_of_the_verbs_that_it_leaves_out():
    engine = build("engine", Bare, factor=3)
    assert isinstance(engine, Bare)
    assert (engine.model, engine.factor, engine.tolerance, engine.takes_adapters) == ("m", 3, 0.0, False)
    assert (engine.describe(), engine.metrics(), engine.request_stop(), engine.close()) == ("Bare", {}, None, None)


def test_a_verb_without_a_default_must_be_written():
    class NoWeights:
        def sample(self, prompts, sampling):
            return []

    with pytest.raises(ComponentError, match="engine 'mine' lacks load_weights"):
        build("engine", NoWeights)
    with pytest.raises(ComponentError, match="task 'mine' lacks heldout, problem"):
        build("task", NoWeights)


@pytest.mark.repository
@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(SOURCES[0].parent)))
def test_no_verb_is_looked_for_by_its_name(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    probes = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("getattr", "hasattr")]
    named = {value for c in probes for arg in c.args[1:2] if isinstance(arg, ast.Constant) for value in [arg.value]}
    assert not named & VERBS, f"{file}: a protocol has defaults for {named & VERBS}"
