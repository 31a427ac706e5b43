"""The `retrain` command on small real runs."""

import subprocess
from pathlib import Path

import pytest

from tests.forks import run_command
from tests.small_runs import TOML

PLUGINS = """
from retrain import TransformOutput


def hipa_like_advantages(rewards):
    if not rewards:
        return []
    mean_r = sum(rewards) / len(rewards)
    return [2.0 * (r - mean_r) for r in rewards]


def scaled(rewards, params):
    return [params["scale"] * r for r in rewards]


def my_transform(ctx):
    scale = float(ctx.params.get("scale", 1.0))
    token_advs = []
    for i, logprobs in enumerate(ctx.logprobs_G):
        token_advs.append([ctx.episode_advantages[i] * scale for _ in logprobs])
    return TransformOutput(token_advs=token_advs)


def my_algorithm(ctx):
    best = max(ctx.rewards)
    return TransformOutput(
        token_advs=[[float(r == best) - 0.5] * len(lp) for r, lp in zip(ctx.rewards, ctx.logprobs_G)],
        extra_metrics={"mine/best": best},
    )
"""
"""A file of a user's with the documented plug-ins."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A user's folder with run.toml in it, entered."""
    (tmp_path / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def cli():
    """Run the command in this process: `cli("train", "run.toml", code=0)` -> result with exit_code, stdout, stderr."""
    from tests.commands import invoke

    return invoke


def installed(*arguments: str, cwd: Path, code: int | None = None) -> subprocess.CompletedProcess:
    """Run the command in a process of its own."""
    return run_command(*arguments, cwd=cwd, code=code)
