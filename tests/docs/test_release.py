"""What a release says of itself: one version everywhere, a short section for users, files that name what exists."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from retrain import __version__
from retrain.cli.main import app

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
CHANGES = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = [section for section in CHANGES[1:] if not section.startswith("[Unreleased]")]
    assert citation["version"] == __version__
    assert released[0].startswith(f"[{__version__}] - {citation['date-released']}")


def test_the_section_of_a_release_is_short():
    [section] = [one for one in CHANGES if one.startswith(f"[{__version__}]")]
    assert len(section.strip().splitlines()) <= 25


def test_the_workflow_gives_options_that_exist():
    [job] = yaml.safe_load((ROOT / "examples" / "not-worse.yml").read_text())["jobs"].values()
    lines = [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]
    group: Any = get_command(app)
    seen = []
    for words in (shlex.split(line)[1:] for line in lines if line.startswith("retrain ")):
        seen.append(words[0])
        group.get_command(None, words[0]).make_context(words[0], words[1:])
    assert seen == ["train", "train", "compare"]


def test_the_dockerfile_copies_what_the_wheel_is_built_from():
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"configs", "docs/skill.md", "retrain", "hatch_build.py", "README.md"} <= set(copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(.*?)\]'", text)[0].split(",")) <= set(extras)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{name}" in allowed for name in copied)
