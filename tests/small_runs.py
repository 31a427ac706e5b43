"""Small real runs: the built-in model after a handful of warm-up steps, cached for the whole test session."""

import gzip
import hashlib
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from retrain.config.load import load
from retrain.errors import Preempted
from retrain.run.session import Resume, run

TOML = """
[training]
max_steps = 4
batch_size = 3
group_size = 4
max_tokens = 12

[warmup]
steps = 12
batch_size = 8
problems = 96

[eval]
every = 2
problems = 6

[checkpoint]
every = 2

[logging]
rollouts_every = 2

[reward_pool]
workers = 0

[[rewards]]
name = "exact"

[[rewards]]
name = "overlong"  # a signal from the first step on
params = { buffer_share = 1.0 }
"""


@pytest.fixture
def toml(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The module's `RUN`, or else the small run."""
    file = tmp_path / "run.toml"
    file.write_text(getattr(request.module, "RUN", TOML))
    return file


@pytest.fixture
def train(toml: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train the small run: `train(*overrides, name=..., resume=..., observe=...)` -> run directory."""

    def go(
        *overrides: str, name: str = "run", resume: Resume | None = None, observe=lambda event, details: None
    ) -> Path:
        loaded = load(toml, [f'logging.dir="{tmp_path}/runs"', f"logging.name={name}", *overrides])
        return run(loaded, resume or Resume(), observe)

    return go


@pytest.fixture
def stopped(train: Callable[..., Path]) -> Callable[..., None]:
    """`stopped(*overrides, name=..., steps=...)`: train until SIGTERM comes in the last of these steps."""

    def go(*overrides: str, name: str = "run", steps: int = 3) -> None:
        def observe(event: str, details: Mapping[str, Any]) -> None:
            if event == "step" and details["step"] == steps - 1:
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(Preempted, match=f"after step {steps}"):
            train(*overrides, name=name, observe=observe)

    return go


@pytest.fixture
def resumed(train: Callable[..., Path], stopped: Callable[..., None]) -> Callable[..., Path]:
    """`resumed(*overrides, steps=...)`: train whole and with an interruption, which are equal; returns the former."""

    def go(*overrides: str, steps: int = 3) -> Path:
        whole = train(*overrides, name="whole")
        stopped(*overrides, name="cut", steps=steps)
        cut = train(*overrides, name="cut", resume=Resume("auto"))
        for file in ("metrics.jsonl", "eval.jsonl"):
            assert (whole / file).exists() == (cut / file).exists()
            assert not (whole / file).exists() or rows(cut / file) == rows(whole / file)
        weights = [
            {file.relative_to(run): file.read_bytes() for file in (run / "model").rglob("*.safetensors")}
            for run in (cut, whole)
        ]
        assert weights[0] == weights[1]
        return whole

    return go


def rows(file: Path) -> list[dict]:
    """Rows of a jsonl file without what a clock decides."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in found]


def stored(run_directory: Path, step: int) -> list[dict]:
    """The rollouts of a step."""
    with gzip.open(run_directory / "rollouts" / f"step-{step:06d}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def digest(run_directory: Path) -> str:
    """sha256 of the final weights."""
    return hashlib.sha256((run_directory / "model" / "model.safetensors").read_bytes()).hexdigest()


def same(found: Path, expected: Path, tolerance=1e-5):
    """Rows, completions and weights of two runs."""
    for name in ("metrics.jsonl", "eval.jsonl"):
        if not (expected / name).exists():
            continue
        for mine, theirs in zip(rows(found / name), rows(expected / name), strict=True):
            assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    stored = sorted((expected / "rollouts").glob("*"))
    assert sorted(file.name for file in (found / "rollouts").glob("*")) == [file.name for file in stored]
    for file in stored:
        for mine, theirs in zip(_completions(found / "rollouts" / file.name), _completions(file), strict=True):
            assert mine == theirs
    weights = [load_file(path / "model" / "model.safetensors") for path in (found, expected)]
    assert weights[0].keys() == weights[1].keys()
    return max(float((weights[0][name] - value).abs().max()) for name, value in weights[1].items())


def _completions(file: Path):
    with gzip.open(file) as lines:
        return [json.loads(line)["completion_ids"] for line in lines]
