"""The contract of environments."""

import pytest

import retrain
from retrain.environments import contract


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (retrain, "Say", "Observation"),
        (retrain, "Reply", "Action"),
        (contract, "Say", "Observation"),
        (contract, "Reply", "Action"),
        (contract, "Game", "EpisodeGenerator"),
    ],
)
def test_earlier_names_warn_where_they_are_used(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as caught:
        assert getattr(module, old) is getattr(contract, new)
    assert caught[0].filename == __file__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Said'"):
        _ = contract.Said  # pyright: ignore[reportAttributeAccessIssue]
