"""What a library does to the process ends with the block it does it in."""

import os
import random

import numpy as np
import pytest
import torch

from retrain.engines.vllm.isolation import Isolation
from tests.vllm.models import process_state


def disturb():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_num_threads = lambda count: None
    os.environ["OWN"] = "1"
    os.environ["KEPT"] = "changed"


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(monkeypatch, fails):
    monkeypatch.setenv("KEPT", "mine")
    monkeypatch.delenv("OWN", raising=False)
    before = process_state()
    try:
        with Isolation({"GIVEN": "1"})():
            disturb()
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert process_state() == before


def test_the_library_finds_its_own_variables_again(monkeypatch):
    monkeypatch.setenv("KEPT", "mine")
    isolated = Isolation({"GIVEN": "1"})
    with isolated():
        assert os.environ["GIVEN"] == "1"
        disturb()
    with isolated():
        assert (os.environ["GIVEN"], os.environ["OWN"], os.environ["KEPT"]) == ("1", "1", "changed")
    assert (os.environ.get("GIVEN"), os.environ["KEPT"]) == (None, "mine")
