import json

import pytest

from tests.cli.conftest import installed
from tests.tools.test_rollout_scores import VECTORS, write


@pytest.fixture
def results(tmp_path):
    return [write(tmp_path / f"{name}.jsonl", VECTORS["evaluate"][name]) for name in ("results", "base_results")]


def test_the_installed_command_gives_the_published_numbers(results, tmp_path):
    done = installed("score", results[0], "--base", results[1], "--k", "1", "--k", "3", "--json", cwd=tmp_path, code=0)
    facts = json.loads(done.stdout)
    assert facts["pass@3"]["value"] == pytest.approx(2 / 3, abs=1e-9)
    assert facts["aes_avg"]["value"] == pytest.approx(1.25, abs=1e-9)
    assert facts["base"]["avg_tokens"]["value"] == 100.0


def test_the_table_explains_the_aes(cli, results):
    text = cli("score", results[0], "--base", results[1], "--k", "2").stdout
    assert cli("score", "--results", results[0], "--base_results", results[1], "--k", "2").stdout == text
    assert "pass@1  66.7%  [20.8%, 93.9%]" in text
    assert "AES from pass@1: +0.5000" in text
    assert "AES from avg@n: +1.2500" in text
    assert "+0.7500  accuracy: 44.4% -> 55.6%" in text
    assert "pass@1  +0.0%  (the same on every problem)" in text


def test_bad_rows_exit_with_3(cli, tmp_path):
    path = write(tmp_path / "r.jsonl", [{"predictions": "1"}])
    result = cli("score", path, code=3)
    assert f"{path}:1: " in result.stderr


@pytest.mark.slow
def test_a_comparison_that_would_not_end_is_killed_and_counted(cli, tmp_path):
    rows = [{"predictions": ["10^{10^{10}}", "\\frac{4}{2}"], "lengths": [1, 1], "answer": "2"}]
    text = cli("score", write(tmp_path / "r.jsonl", rows), "--equivalence", "symbolic").stdout
    assert "failed  1 comparisons" in text
    assert "avg@n  50.0%" in text
