"""The contract of environments."""

import pytest

import retrain
from retrain.environments import contract


@pytest.mark.parametrize(("old", "new"), [("Say", "Observation"), ("Reply", "Action")])
def test_earlier_names_warn_where_they_are_used(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as caught:
        assert getattr(retrain, old) is getattr(contract, new)
    assert caught[0].filename == __file__
