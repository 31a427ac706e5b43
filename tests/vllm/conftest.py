"""One vLLM engine at a time: each is closed before the next starts."""

import gc

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.small_runs import TOML
from tests.smollm2 import HERE, MISSING


@pytest.fixture(autouse=True)
def frozen():
    """Starting an engine collects garbage several times, half a second each with all that is imported here.

    What is frozen is not looked through; vLLM thaws it when an engine ends.
    """
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Say loudly that a real model was not tested."""
    if not HERE:
        terminalreporter.write_sep("=", f"NOT TESTED with a real model: {MISSING}", yellow=True, bold=True)


@pytest.fixture
def train(tmp_path):
    """Train the small run with vLLM: `train(*overrides, name=..., resume=..., observe=...)` -> run directory."""
    file = tmp_path / "run.toml"
    file.write_text(TOML)

    def go(*overrides, name="run", resume=None, observe=lambda event, details: None):
        common = (f'logging.dir="{tmp_path}/runs"', f"logging.name={name}", "rollout.engine=vllm")
        exact = ("model.dtype=float32", "rollout.parity_every=1")
        return run(load(file, [*common, *exact, *overrides]), resume or Resume(), observe)

    return go
