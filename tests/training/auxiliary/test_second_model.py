"""Tokenizers of models that judge the same tokens."""

import pytest

from retrain.errors import ComponentError
from retrain.training.auxiliary.second_model import check_vocabulary

OWN = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"a": 0, "c": 1, "b": 2}, "token 'b' has id 2 there and 1 here"),
        ({"a": 0, "b": 1}, "token 'c' has id none there and 2 here"),
        ({**OWN, "d": 3}, "token 'd' has id 3 there and none here"),
    ],
)
def test_the_first_token_that_differs_is_named(other, says):
    with pytest.raises(ComponentError, match="another tokenizer than the policy") as caught:
        check_vocabulary(OWN, other, "[teacher] model = 'x'")
    assert says in str(caught.value)
    assert "[teacher] model = 'x'" in str(caught.value)


def test_equal_tokenizers_pass_in_any_order():
    check_vocabulary(OWN, dict(reversed(OWN.items())), "x")
