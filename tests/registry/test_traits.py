"""Traits, typed for each kind."""

import pytest

from retrain.errors import ComponentError
from retrain.registry import KINDS, Component, components, engine, loss
from retrain.registry.component import REGISTERED
from retrain.registry.traits import EngineTraits, LossTraits


@pytest.fixture
def forgotten():
    """What a test registers is unknown again afterwards."""
    components()
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


class Mine:
    def sample(self, requests, sampling): ...

    def load_weights(self, weights, version): ...


@pytest.mark.usefixtures("forgotten")
def test_a_decorator_states_the_traits_of_its_kind():
    engine("mine", exact=True, remote=True, table="other")(Mine)
    found = REGISTERED["engine", "mine"]
    assert engine.traits_of(found) == EngineTraits(exact=True, remote=True, table="other")
    assert found.table == "other"


def test_an_unknown_trait_is_refused_with_the_nearest_name():
    with pytest.raises(ComponentError, match='@engine has no trait "remot"') as caught:
        engine("mine", **{"remot": True})
    assert caught.value.fix == 'did you mean "remote"?'


@pytest.mark.parametrize("kind", KINDS)
def test_an_undecorated_component_has_the_default_traits(kind):
    component = Component(kind, "mine", len, "mine")
    assert KINDS[kind].traits_of(component) == KINDS[kind].traits()


def test_a_loss_without_a_stated_weight_has_weight_one():
    assert Component("loss", "mine", lambda logprobs: logprobs, "mine").bind().params == {"weight": 1.0}
    assert loss.traits_of(components("loss")[0]).weight in (0.0, 1.0)
    assert LossTraits().source == "policy"
