"""Plug-ins that write into what they are given, or return what nothing can use."""

import pytest
import torch

from retrain.algorithms.graph.pipeline import check_result
from retrain.errors import UserCodeError
from retrain.registry import Component
from retrain.registry.call import Call
from retrain.types import Problem
from tests.fuzz.test_plugins import batch, part, refused, refused_verb, use

WRITES = {  # each changes every value, and in place
    "copy_": lambda column: column.copy_(column == 0),
    "a slice": lambda column: column[0].copy_(column[0] == 0),
    "out": lambda column: torch.logical_not(column, out=column),
    "numpy": lambda column: column.numpy().__setitem__(..., column == 0),
    "data": lambda column: column.data.copy_(column == 0),
}
RESULTS = {
    "advantage": ("rewards", lambda rewards: rewards - 0.5),
    "transform": ("response_mask", lambda mask: mask * 1.0),
    "algorithm": ("sampler_logprobs", lambda logprobs: logprobs * 0),
    "uncertainty": ("sampler_logprobs", lambda logprobs: -logprobs),
    "signal": ("response_mask", lambda mask: mask * 1.0),
    "filter": ("advantages", lambda advantages: torch.ones(len(advantages), dtype=torch.bool)),
    "loss": ("advantages, logprobs", lambda advantages: advantages),
    "reduction": ("mask", lambda mask: mask / mask.sum()),
}


def writing(kind, write):
    """A sound component of the kind that also writes into its first column."""
    columns, result = RESULTS[kind]
    first = columns.partition(",")[0]
    scope = {"write": write, "result": result}
    more = " * logprobs" if kind == "loss" else ""
    exec(f"def mine({columns}):\n    found = result({first}){more}\n    write({first})\n    return found\n", scope)
    return scope["mine"], first


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", RESULTS)
def test_writing_into_a_column_is_refused_by_name(kind, write):
    mine, column = writing(kind, WRITES[write])
    assert f"writes into {column}, which other components and the trainer also read" in refused(kind, mine)
    use(kind, writing(kind, lambda column: None)[0])


@pytest.mark.parametrize("verb", ["before", "after"])
def test_writing_into_the_batch_is_refused(verb):
    def write(self, batch):
        batch.rewards.zero_()
        return {}

    assert "writes into rewards" in refused("transform", part(**{verb: write}))


def test_an_engine_that_writes_into_the_weights_is_refused():
    weights = {"w": torch.ones(3)}
    verbs = {"sample": lambda self, requests, sampling: [], "load_weights": lambda self, given, version: scale(given)}

    def scale(given):
        given["w"].mul_(2)

    built = Component("engine", "mine", type("Mine", (), verbs), "mine", source="dotted path").bind().build({})
    with pytest.raises(UserCodeError, match='engine "mine": writes into w'):
        built.load_weights(weights, 1)


def test_an_advantage_that_float32_does_not_hold_is_refused():
    assert "not a finite number of float32" in refused("advantage", lambda rewards: [1e39] * len(rewards), "lists")
    single = batch().replace(rewards=batch().rewards.float())
    mine = Component("advantage", "mine", lambda rewards: rewards.double() + 1e39, "mine", source="dotted path").bind()
    with pytest.raises(UserCodeError, match=r"NaN or infinite .*; the group's rewards: [\d.]+, "):
        check_result(Call("advantage", "mine"), mine, mine(single.rewards), vars(single))


PROMPTS = {
    "is empty": ["", [], [{"role": "user", "content": ""}]],
    "a message is a dict": [["1+1?"], [{"content": "1+1?"}]],
    "not text": [[{"role": "user", "content": None}], [{"role": "user"}], 3],
}


@pytest.mark.parametrize(("match", "prompt"), [(match, one) for match, several in PROMPTS.items() for one in several])
def test_a_prompt_that_cannot_be_asked_is_refused(match, prompt):
    assert match in refused_verb("task", "problem", lambda: Problem("a", prompt, "2"))
    assert match in refused_verb("task", "heldout", lambda: [Problem("a", prompt, "2")])
