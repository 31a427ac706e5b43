"""`engine_status` samples one token."""

import importlib.util
import sys

import pytest

from retrain.errors import install
from retrain.registry import engine
from retrain.registry.component import REGISTERED
from retrain.run.before.engine_check import engine_status


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
    assert engine_status("torch").startswith("works (torch engine, fused decoder")
    assert engine_status("transformers").startswith("works (transformers engine")


def test_what_keeps_an_engine_from_working_is_said(broken, monkeypatch):
    assert engine_status("broken") == 'broken: engine "broken": raised OSError: no such device'
    assert engine_status("elsewhere") == "needs [elsewhere] urls"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert engine_status("vllm") == f"vllm is not installed; {install('vllm')}"


def test_an_installation_of_vllm_that_cannot_be_imported_is_broken(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert engine_status("vllm").startswith('broken: engine "vllm" cannot be started (ModuleNotFoundError')
