"""One damaged file of a campaign costs its own run, or is named; the other runs are shown."""

import json
import re

import pytest

from tests.campaign.tables import write_campaign

CELL = "cells/maxrl/s1"
DEEP = b"[" * 100_000 + b"]" * 100_000 + b"\n"
DAMAGE = {
    "NULs": b"\0\0\0\n",
    "no UTF-8": b"\xff\xfe\n",
    "garbage": b"garbage\n",
    "a list": b"[1]\n",
    "deep": DEEP,
    "torn": b'{"status": "do',
}
FILES = ("outcome.json", "metrics.jsonl", "eval.jsonl")
CASES = [
    (file, content) for file in FILES for content in DAMAGE.values() if file == "outcome.json" or b"{" not in content
]


@pytest.fixture
def campaign(cwd):
    write_campaign(cwd / "runs/two", conditions=("grpo", "maxrl"), seeds=range(3), steps=40, failed=(), missing=())
    return cwd / "runs/two"


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("file", "content"), CASES, ids=lambda value: repr(value)[:30])
def test_a_damaged_file_of_a_run_costs_that_run_alone(campaign, cli, file, content):
    (campaign / CELL / file).write_bytes(content)
    place = rf"{re.escape(f'{CELL}/{file}')}:1: "
    shown = cli("status", "runs/two", "--json", code=0)
    states = {row["id"]: row["state"] for row in json.loads(shown.stdout)[0]["runs"]}
    assert states.pop("maxrl/s1") == "unreadable"
    assert set(states.values()) == {"done"}
    assert cli("status").exit_code == 0
    cli("report", "runs/two", code=0)
    assert re.search(place, (campaign / "report.md").read_text())
    compared = cli("compare", "runs/two", code=0)
    assert "2 seeds" in compared.stdout


@pytest.mark.parametrize(
    "content",
    [*DAMAGE.values(), b'{"cells": 3}', b'{"cells": [null]}', b'{"cells": [{"id": 1}]}', b'{"cells": []}', b"{}"],
)
def test_a_damaged_plan_is_named(campaign, cli, content):
    (campaign / "plan.json").write_bytes(content)
    for command in ("status", "report", "compare", "worker"):
        result = cli(command, "runs/two", code=6)
        assert "runs/two/plan.json" in result.output
        assert len(result.output) < 1000
    assert cli("status").exit_code == 0


PLANS = [
    ("baseline", [3, "nobody", ["grpo"]]),
    ("alpha", [-1, 0, 1.0, "0.05", None, float("inf")]),
    ("ladder", [3, None, [["grpo"]], [["grpo", "nobody"]], [["grpo", 1]], {"grpo": "maxrl"}]),
    ("retries", [-1, 0.5, "x", None]),
    ("cells", [{}, "x", [[]], [3]]),
]
CELLS = [("seed", [-1, "x", 2**70, None]), ("path", ["/etc", "a\0b", "", 3, "../..", "cells/../../s0"])]


def changed(data, key, value):
    return data | {key: value}


@pytest.mark.parametrize(
    ("key", "values", "cell"), [*((*row, False) for row in PLANS), *((*row, True) for row in CELLS)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_in_a_plan_that_nothing_can_mean_is_named(campaign, cli, key, values, cell):
    plan = json.loads((campaign / "plan.json").read_text())
    for value in values:
        first = changed(plan["cells"][0], key, value)
        damaged = changed(plan, "cells", [first, *plan["cells"][1:]]) if cell else changed(plan, key, value)
        (campaign / "plan.json").write_text(json.dumps(damaged))
        result = cli("report", "runs/two", code=6)
        assert re.match(r"\S*runs/two/plan\.json:1: ", result.stderr), result.stderr


def test_control_characters_of_a_label_are_in_no_report(campaign, cli):
    """A label stands in the tables, in the curves and in the tooltips of both."""
    odd = "maxrl\x1b[31m\u202e<b>"
    text = (campaign / "plan.json").read_text().replace('"maxrl"', json.dumps(odd))
    (campaign / "plan.json").write_text(text)
    assert cli("report", "runs/two").exit_code == 0
    for page in (campaign / "report.html", campaign / "report.md"):
        text = page.read_text()
        assert not {"\x1b", "\u202e"} & {*text}, page
        assert "maxrl·[31m·" in text
        assert "·<b>" not in text
        assert "&amp;lt;" not in text
