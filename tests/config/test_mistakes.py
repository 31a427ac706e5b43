"""Every mistake of a configuration is printed with line, column, key and fix, and files without one are valid."""

from pathlib import Path
from typing import Any

import pytest
import tomli

from retrain.registry.component import REGISTERED
from tests.commands import invoke

GROUPS = tomli.loads(Path(__file__).with_name("mistakes.toml").read_text())["group"]
CASES = [pytest.param(group, case, id=group["about"]) for group in GROUPS for case in group["case"]]


@pytest.fixture
def answer(cwd, monkeypatch):
    """Run a command in a folder of its own with the files of a case; returns its lines on stderr and its exit code."""
    # Lists of known names have the built-in ones, whatever plug-ins other tests of this process have imported.
    for key in [key for key, component in REGISTERED.items() if component.source == "registered"]:
        monkeypatch.delitem(REGISTERED, key)

    def go(command: str, group: Any, case: Any) -> tuple[list[str], int]:
        for name, text in {**group.get("files", {}), **case.get("files", {})}.items():
            folder = Path(name) if name.endswith("/") else Path(name).parent
            folder.mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                Path(name).write_text(text)
        Path("run.toml").write_text(case.get("toml", "").replace("HEAD\n", group.get("head", "")))
        result = invoke(command, "run.toml", *(f"--set={flag}" for flag in case.get("set", ())))
        return [line.replace(str(cwd), "FOLDER") for line in result.stderr.splitlines() if line], result.exit_code

    return go


@pytest.mark.parametrize(("group", "case"), CASES)
def test_validate_says_what_is_wrong_where_and_what_to_do(answer, group: Any, case: Any):
    lines, exit_code = answer("validate", group, case)
    assert lines == case.get("says", [])
    valid = all(line.startswith("warning: ") for line in lines)
    assert exit_code == case.get("exit", 0 if valid else 2)


@pytest.mark.parametrize(
    ("command", "about", "key"),
    [
        ("explain", "Files that are not there", "[jsonl] path"),
        ("train", "Files that are not there", "[jsonl] path"),
        ("train", "Data that training would not find", "[eval] problems"),
        ("campaign", "Files that are not there", "[[campaign.conditions]] jsonl.path"),
    ],
)
def test_other_commands_refuse_data_before_they_load_a_model(answer, command, about, key, tmp_path):
    (group,) = [group for group in GROUPS if group["about"] == about]
    case = next(case for case in group["case"] if any(f": {key}: " in line for line in case.get("says", ())))
    assert answer(command, group, case) == (case["says"], 3)
    assert about != "Files that are not there" or not (tmp_path / "runs").exists()
