"""Plug-ins with mistakes: each ends in an error that names it, and in nothing else.

Every kind of component x every way to go wrong, called as training calls it.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from retrain.algorithms.graph.objective import Objective
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.errors import ComponentError, UserCodeError
from retrain.registry import Component, bind
from retrain.types import Problem
from tests.algorithms.conftest import make_batch

RAISED = {
    "value": lambda: ValueError("no"),
    "exit": lambda: SystemExit(0),
    "escape codes": lambda: RuntimeError("\x1b]0;owned\x07\x1b[2J"),
}
SHAPES = {
    "scalar": lambda n, t: torch.zeros(()),
    "[N, 1]": lambda n, t: torch.zeros(n, 1),
    "[1]": lambda n, t: torch.zeros(1),
    "[N, T + 1]": lambda n, t: torch.zeros(n, t + 1),
    "empty": lambda n, t: torch.zeros(0),
}
VALUES = {
    "none": lambda n, t: None,
    "text": lambda n, t: "1.0",
    "dict": lambda n, t: {"x": 1.0},
    "numpy": lambda n, t: np.zeros((n, t)),
    "pair of values": lambda n, t: (torch.zeros(n, t), torch.zeros(n, t)),
}
METRICS = {
    "step": {"step": 77.0},
    "reward": {"reward/mean": 99.0},
    "loss": {"loss/total": 1.0},
    "no text": {3: 1.0},
    "escape": {"\x1b[2J/x": 1.0},
    "text": {"my/x": "1"},
    "none": {"my/x": None},
}
STAGES = ("advantage", "transform", "algorithm", "uncertainty", "signal", "filter")
NEEDS = {"advantage": ("rewards",), "filter": ("advantages",), "loss": ("logprobs",), "reduction": ("mask",)}


def target(kind, result):
    """A function of one column of the kind, which does what `result(n, t)` says."""

    def called(column):
        return result(len(column), 5)

    called.__signature__ = __import__("inspect").Signature(
        [
            __import__("inspect").Parameter(name, __import__("inspect").Parameter.POSITIONAL_OR_KEYWORD)
            for name in NEEDS.get(kind, ("response_mask",))
        ]
    )
    return called


def batch():
    return make_batch([[-1.0] * 5, [-0.5] * 3, [-2.0] * 4, [-0.2] * 2], [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]).replace(
        planning_mask=torch.zeros(4, 5, dtype=torch.bool), sepa_lambda=0.5
    )


def use(kind, function, contract="columns"):
    """Call a component of the kind as a step of training does."""
    mine = Component(kind, "mine", function, "mine", contract, source="dotted path").bind()
    given = batch()
    if kind in ("loss", "reduction"):
        terms = [mine if kind == "loss" else bind("loss", "reinforce", {"weight": 1.0})]
        objective = Objective(terms, mine if kind == "reduction" else bind("reduction", "token_mean"))
        step = objective.step(given)
        logprobs = given.sampler_logprobs.clone().requires_grad_()
        columns = {name: given.column(name) for name in objective.reads} | {"logprobs": logprobs}
        return step.of(columns, step.weights)
    first = mine if kind in ("advantage", "algorithm") else bind("advantage", "grpo")
    signals = {"uncertainty": mine if kind == "uncertainty" else bind("uncertainty", "surprisal"), "mine": mine}
    pipeline = Pipeline.resolve(
        [first, mine] if kind == "transform" else [first],
        mine if kind == "filter" else bind("filter", "none"),
        signals.get,
        observed=("uncertainty", "mine") if kind == "signal" else ("uncertainty",),
        given=frozenset({"planning_mask", "sepa_lambda"}),
    )
    pipeline.build({})
    pipeline.before(given)
    credited, _ = pipeline.credit(given)
    pipeline.informative(credited)
    pipeline.after(credited)
    for part in pipeline.stateful.values():
        part.load_state_dict(part.state_dict())
    return credited


def refused(kind, function, contract="columns"):
    with pytest.raises((UserCodeError, ComponentError)) as caught:
        use(kind, function, contract)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert f'{kind} "mine"' in text
    assert "\x1b" not in text
    assert len(text) < 5000
    assert "/retrain/" not in text.replace("/retrain/tests", ""), "frames of this package are not the user's"
    return text


def raising(make):
    def result(n, t):
        raise make()

    return result


@pytest.mark.parametrize("kind", [*STAGES, "loss", "reduction"])
@pytest.mark.parametrize("what", RAISED)
def test_what_is_raised(kind, what):
    text = refused(kind, target(kind, raising(RAISED[what])))
    assert "test_plugins.py" in text, "the user's own frame is shown"


@pytest.mark.parametrize("kind", [*STAGES, "loss", "reduction"])
@pytest.mark.parametrize("what", {**SHAPES, **VALUES})
def test_what_is_returned(kind, what):
    if (kind, what) == ("signal", "scalar"):
        use(kind, target(kind, SHAPES[what]))  # a number is a column, too
    else:
        refused(kind, target(kind, {**SHAPES, **VALUES}[what]))


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("what", METRICS)
def test_metrics(kind, what):
    sizes = {"advantage": lambda n, t: torch.zeros(n), "filter": lambda n, t: torch.ones(n, dtype=torch.bool)}
    value = sizes.get(kind, lambda n, t: torch.zeros(n, t))
    refused(kind, target(kind, lambda n, t: (value(n, t), METRICS[what])))


def test_a_loss_without_gradient_and_a_filter_that_splits_a_group():
    assert "without gradient" in refused("loss", lambda logprobs: logprobs.detach())
    assert "same for all rows" in refused("filter", lambda group_ids: torch.arange(len(group_ids)) > 0)
    assert "booleans" in refused("filter", lambda group_ids: torch.ones(len(group_ids)))


@pytest.mark.parametrize("kind", ["advantage", "transform", "algorithm", "uncertainty", "reduction"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(kind, value):
    refused(kind, target(kind, lambda n, t: torch.full((n,) if kind == "advantage" else (n, t), value)))


VERBS = ("__init__", "before", "after", "state_dict", "load_state_dict", "__call__")


@pytest.mark.parametrize(("verb", "what"), itertools.product(VERBS, ("value", "exit")))
def test_a_part_whose_verb_raises(verb, what):
    def fail(self, *arguments):
        raise RAISED[what]()

    refused("transform", part(**{verb: fail}))


@pytest.mark.parametrize(
    "state",
    [None, 3, "text", [], {"a": object()}, {3: 1}, {"a": {1, 2}}, {"a": print}],
    ids=lambda state: repr(state)[:14],
)
def test_a_part_whose_state_cannot_be_stored(state):
    refused("transform", part(state_dict=lambda self: state))


def part(**verbs):
    """A class of a transform with all verbs, some of them replaced."""
    from retrain.protocols import StatefulComponent

    def call(self, advantages):
        return advantages

    sound = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None, "__call__": call}
    return type("Mine", (StatefulComponent,), sound | verbs)


ASKED = {("task", "problem"): (0,), ("task", "heldout"): (4,)}
SOUND = {"task": ("problem", "heldout"), "engine": ("sample", "load_weights"), "executor": ("run",)}


def ask(kind, verb, function):
    """Build a class of the kind, one verb of which does what `function` does, and call that."""
    verbs = dict.fromkeys((*SOUND[kind], verb), lambda self, *arguments: function())
    built = Component(kind, "mine", type("Mine", (), verbs), "mine", source="dotted path").bind().build({})
    return getattr(built, verb)(*ASKED[kind, verb])


def refused_verb(kind, verb, function):
    with pytest.raises(UserCodeError, match=f"^{kind} ") as caught:
        ask(kind, verb, function)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert text.startswith(f'{kind} "mine": ')
    assert "\x1b" not in text
    assert len(text) < 5000
    assert "/retrain/registry" not in text, "frames of this package are not the user's"
    return text


@pytest.mark.parametrize(("kind", "verb"), ASKED)
@pytest.mark.parametrize("what", RAISED)
def test_what_a_verb_raises(kind, verb, what):
    assert "test_plugins.py" in refused_verb(kind, verb, lambda: raising(RAISED[what])(1, 1))


@pytest.mark.parametrize("kind", SOUND)
def test_a_class_that_cannot_be_built(kind):
    def fail(self):
        raise ValueError("no")

    verbs = {"__init__": fail} | dict.fromkeys(SOUND[kind], lambda self, *arguments: None)
    with pytest.raises(UserCodeError, match=f'{kind} "mine": raised ValueError: no'):
        Component(kind, "mine", type("Mine", (), verbs), "mine", source="dotted path").bind().build({})


PROBLEMS = [
    None, 3, "1+1?", {"prompt": "1+1?"}, (), Problem(3, "1+1?", "2"), Problem("a", None, "2"), Problem("a", b"1", "2"),
    Problem("a", "1+1?", 2), Problem("a", "1+1?", "2", solution=3), Problem,
]  # fmt: skip


@pytest.mark.parametrize("value", PROBLEMS)
def test_a_problem_that_is_none(value):
    refused_verb("task", "problem", lambda: value)
    refused_verb("task", "heldout", lambda: [value])
    refused_verb("task", "heldout", lambda: value)
    refused_verb("task", "heldout", lambda: iter([value]))


def test_what_is_right_passes():
    assert ask("task", "problem", lambda: Problem("a", "1+1?", "2")).answer == "2"
    assert ask("task", "heldout", list) == []
