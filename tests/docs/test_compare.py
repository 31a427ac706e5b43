"""The examples of docs/compare.md print what the page says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
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
            arguments = [sys.executable, "-m", "retrain", *shlex.split(command)[1:]]
            done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
            assert done.stdout == text
            runs += 1
    assert runs == 4
    assert (tmp_path / "comparison.html").exists()
