"""`retrain compare`, and `retrain report` of a campaign."""

import json

import pytest

from tests.campaign.tables import write_campaign


@pytest.fixture
def campaign(tmp_path):
    return write_campaign(
        tmp_path / "runs" / "two", conditions=("grpo", "maxrl"), seeds=range(6), steps=40, failed=(), missing=()
    )


def test_compare_prints_conditions_and_the_verdict(campaign, cli):
    result = cli("compare", str(campaign))
    assert result.exit_code == 0
    assert result.stdout.startswith("condition  runs  accuracy, mean")
    assert "All 12 runs finished. 1 of 1 conditions differs significantly from the baseline." in result.stdout
    assert "maxrl against grpo: +0.0" in result.stdout


def test_compare_writes_html_and_json(campaign, cli, tmp_path):
    runs = [str(path) for path in sorted(campaign.glob("cells/*/s*"))]
    result = cli("compare", *runs, "--html", str(tmp_path / "out.html"), "--json")
    found = json.loads(result.stdout)
    assert found["comparisons"][0]["family"] == "baseline"
    assert found["comparisons"][0]["significant"] is True
    assert "retrain compare" in (tmp_path / "out.html").read_text()


def test_compare_of_no_run_says_so(cli, tmp_path):
    result = cli("compare", str(tmp_path))
    assert result.exit_code == 2
    assert "contains no run" in result.stderr


def test_compare_of_files_without_a_result_is_an_error(cli, tmp_path):
    (tmp_path / "t.csv").write_text("method,seed,accuracy\na,0,\nb,0,nan\n")
    result = cli("compare", str(tmp_path / "t.csv"))
    assert result.exit_code == 3
    assert "no run has a result" in result.stderr


def test_report_of_a_campaign_prints_the_verdict_and_the_files(campaign, cli):
    result = cli("report", str(campaign))
    assert result.exit_code == 0
    assert result.stdout.startswith("All 12 runs finished.")
    assert f"{campaign}/report.html" in result.stdout
    assert (campaign / "results.csv").is_file()
