"""Every command that installs this package installs this one: `retrain` on the public index is another trainer."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from retrain import errors
from retrain.errors import install

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = re.compile(r"""(?:pip|uv) (?:install|add)[^\n`#;]*""")
OTHER = re.compile(r"""["' ]retrain(?:\[|==|>=|["'\s]|$)""")
EXTRAS = re.compile(r"""(?:retrain-rl|-e ['"]?\.)\[([\w,-]+)\]""")


def commands(text):
    return INSTALL.findall(text)


def tracked():
    """Text of every file of the repository, or of this copy of it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    names = [name for name in listed if name] or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.[tm][od]*")]
    for name in names:
        if (ROOT / name).suffix in (".py", ".md", ".toml", ".yml", "") and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text(errors="replace")


def test_no_command_installs_the_package_of_another_trainer():
    wrong = {(name, line) for name, text in tracked() for line in commands(text) if OTHER.search(line)}
    assert wrong - {(name, line) for name, line in wrong if name == "tests/docs/test_install.py"} == set()


def test_the_rule_sees_what_it_forbids():
    assert OTHER.search(commands('pip install "retrain[vllm]"')[0])
    assert OTHER.search(commands("run pip install retrain")[0])
    assert not OTHER.search(commands("pip install -e '.[vllm]'")[0])
    assert not OTHER.search(commands(install("vllm"))[0])


def test_every_extra_that_a_command_names_exists():
    named = {extra for _, text in tracked() for found in EXTRAS.findall(text) for extra in found.split(",")}
    assert "vllm" in named
    assert named <= set(PROJECT["optional-dependencies"])


def test_hints_work_in_a_clone_and_elsewhere(monkeypatch, tmp_path):
    """In a clone the distribution may be unknown to the package index; the clone is not."""
    assert install("lora") == f"pip install -e '{ROOT}[lora]'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "retrain" / "errors.py"))
    assert install("lora") == f"pip install '{PROJECT['name']}[lora]'"
