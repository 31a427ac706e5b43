import json
from dataclasses import replace

from retrain.registry import find
from retrain.registry.decorators import REGISTERED
from tests.cli.conftest import installed


def test_verify_prints_a_line_for_each_property(tmp_path):
    done = installed("verify", "--trials", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("ok ") for line in lines)


def test_verify_exits_with_1_when_a_property_fails(cli, monkeypatch):
    wrong = replace(find("advantage", "rloo"), target=lambda rewards, group_ids: rewards)
    monkeypatch.setitem(REGISTERED, ("advantage", "rloo"), wrong)
    result = cli("verify", "--trials", "3", "--json")
    assert result.exit_code == 1
    rows = {row["name"].split()[0]: row["ok"] for row in json.loads(result.stdout)}
    assert rows["leave-one-out"] is False
    assert "FAILED  leave-one-out" in cli("verify", "--trials", "3").stdout
