"""The examples of docs/compare.md print what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from tests.forks import run_command

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compare.md"
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


def test_every_example_prints_what_the_page_says(tmp_path):
    command, runs = "", 0
    for language, title, text in BLOCK.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text)
        elif language == "sh":
            command = text
        else:
            done = run_command(*shlex.split(command)[1:], cwd=tmp_path)
            assert done.stdout == text
            runs += 1
    assert runs == 2
    assert (tmp_path / "comparison.html").exists()


def test_the_verdict_of_readme_is_what_its_command_prints():
    readme = (ROOT / "README.md").read_text()
    ((command, block),) = re.findall(r"`retrain (compare \S+\.csv)`:\n\n```\n(.*?)```", readme, re.DOTALL)
    assert run_command(*command.split(), cwd=ROOT, code=0).stdout.endswith(block)
