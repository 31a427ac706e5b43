"""The shapes in the signatures are checked while tests run."""

import pytest
import torch

from retrain import functional as F

pytestmark = pytest.mark.numeric


def test_a_wrong_shape_is_refused():
    with pytest.raises(Exception, match="group_ids"):
        F.groups.group_mean(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(Exception, match="mask"):
        F.masked.masked_mean(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.bool))


def test_an_unknown_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'grups'"):
        F.grups  # noqa: B018
