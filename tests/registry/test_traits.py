"""Traits, typed for each kind."""

import pytest

from retrain.errors import ComponentError
from retrain.registry import KINDS, Component, components, engine, loss
from retrain.registry.traits import LossTraits


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
