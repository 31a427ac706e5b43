"""The `retrain` command on small real runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_runs import TOML
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cli-cache")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch, session_cache) -> Path:
    """A user's folder with run.toml in it, entered."""
    (tmp_path / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RETRAIN_CACHE", str(session_cache))
    return tmp_path


@pytest.fixture
def cli():
    """Run the command in this process: `cli("train", "run.toml")` -> result with exit_code, stdout, stderr."""
    from typer.testing import CliRunner

    from retrain.cli.main import app

    return lambda *arguments, **options: CliRunner().invoke(app, list(arguments), **options)


def installed(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run the installed command in a process of its own."""
    command = [str(Path(sys.executable).parent / "retrain"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
