"""`try_engine` samples one token."""

import importlib.util
import sys

import pytest

from retrain.errors import install
from retrain.registry import engine
from retrain.registry.component import REGISTERED
from retrain.run.before.engine_check import try_engine


@pytest.fixture
def broken():
    """An engine that cannot be built, and one whose table has a required key."""

    @engine("broken")
    class Broken:
        def __init__(self, model):
            raise OSError("no such device")

        def sample(self, prompts, sampling):
            return []

        def load_weights(self, weights, version):
            pass

    @engine("elsewhere")
    class Elsewhere:
        def __init__(self, *, urls: list[str]):
            self.urls = urls

    yield
    for cls in (Broken, Elsewhere):
        del REGISTERED["engine", cls.__name__.lower()]


def test_an_engine_that_works_describes_itself():
    assert try_engine("torch").startswith("works (torch engine, fused decoder")
    assert try_engine("transformers").startswith("works (transformers engine")


def test_what_keeps_an_engine_from_working_is_said(broken, monkeypatch):
    assert try_engine("broken") == 'broken: engine "broken": raised OSError: no such device'
    assert try_engine("elsewhere") == "needs [elsewhere] urls"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert try_engine("vllm") == f"vllm is not installed; {install('vllm')}"


def test_an_installation_of_vllm_that_cannot_be_imported_is_broken(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert try_engine("vllm").startswith('broken: engine "vllm" cannot be started (ModuleNotFoundError')
