"""`retrain compare`, and `retrain report` of a campaign."""

import json
import os
import re
import subprocess

import pytest

from tests.campaign.tables import write_campaign
from tests.forks import RETRAIN


@pytest.fixture
def campaign(tmp_path):
    return write_campaign(
        tmp_path / "runs" / "two", conditions=("grpo", "maxrl"), seeds=range(6), steps=40, failed=(), missing=()
    )


def test_compare_prints_conditions_and_the_verdict(campaign, cli):
    result = cli("compare", str(campaign), code=0)
    assert result.stdout.startswith("what differs\n")
    assert "\ncondition  runs  accuracy" in result.stdout
    assert "All 12 runs finished. 1 of 1 condition measured: 1 better." in result.stdout
    assert "▲ better  maxrl against grpo  " in result.stdout


def test_compare_writes_html_and_json(campaign, cli, tmp_path):
    runs = [str(path) for path in sorted(campaign.glob("cells/*/s*"))]
    result = cli("compare", *runs, "--html", str(tmp_path / "out.html"), "--json")
    found = json.loads(result.stdout)
    assert found["comparisons"][0]["family"] == "baseline"
    assert found["comparisons"][0]["verdict"] == "better"
    assert "retrain compare" in (tmp_path / "out.html").read_text()


def test_report_of_a_campaign_prints_the_verdict_and_the_files(campaign, cli):
    result = cli("report", str(campaign), code=0)
    assert result.stdout.startswith("All 12 runs finished.")
    assert f"{campaign}/report.html" in result.stdout
    assert (campaign / "results.csv").is_file()


def test_compare_ends_with_1_if_something_is_worse(campaign, cli, tmp_path):
    runs = [str(path) for path in sorted(campaign.glob("cells/*/s*"))]
    assert cli("compare", *runs, "--fail-if", "worse").exit_code == 0
    assert cli("compare", *runs, "--fail-if", "worse", "--metric", "accuracy", "--goal", "min").exit_code == 1
    wrong = cli("compare", *runs, "--fail-if", "better", code=2)
    assert "--fail-if" in wrong.stderr


def test_compare_that_compares_nothing_does_not_pass(cli, tmp_path):
    file = tmp_path / "t.csv"
    for rows, code in (("a,0,0.5\nb,1,0.4", 2), ("a,0,0.5\na,1,0.4", 2), ("a,0,0.5\nb,0,0.4", 0)):
        file.write_text(f"method,seed,accuracy\n{rows}\n")
        assert cli("compare", str(file)).exit_code == 0
        assert cli("compare", str(file), "--fail-if", "worse").exit_code == code


def test_compare_does_not_replace_its_input(cli, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("method,seed,accuracy\na,0,0.5\nb,0,0.6\n")
    result = cli("compare", str(file), "--html", str(file), code=2)
    assert "is an input" in result.stderr
    assert file.read_text().startswith("method")


def test_what_cannot_be_written_or_named_has_a_code_of_its_own_and_no_traceback(tmp_path):
    """1 is the code of "worse"."""
    (tmp_path / "results.csv").write_text("condition,seed,score\na,0,.5\na,1,.6\na,2,.55\nb,0,.7\nb,1,.75\nb,2,.8\n")
    outcomes = {}
    for case, command in {
        "closed": "compare results.csv >&-",
        "full": "compare results.csv >/dev/full",
        "help": "compare --help >/dev/full",
        "long": f"compare {'x' * 300}.csv",
        "no run": f"status {'x' * 300}",
    }.items():
        ended = subprocess.run(["bash", "-c", f"{RETRAIN} {command}"], cwd=tmp_path, capture_output=True, text=True)
        assert "Traceback" not in ended.stderr
        outcomes[case] = ended.returncode
    assert outcomes == {"closed": 6, "full": 6, "help": 6, "long": 2, "no run": 2}
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    drawn = subprocess.run([RETRAIN, "compare", "results.csv"], cwd=tmp_path, env=ascii_only, capture_output=True)
    assert re.search(r"\^ better .* \|-+o-+\|", drawn.stdout.decode("ascii"))


def test_looks_are_not_replaced_by_unpaired_tests(tmp_path, cli):
    few = {"conditions": ("grpo", "maxrl"), "failed": (), "missing": (), "steps": 40}
    directory = write_campaign(tmp_path / "c", seeds=range(9), looks=[8], **few)
    refused = cli("compare", str(directory), "--unpaired")
    assert refused.exit_code == 2
    assert "--unpaired: the looks stopped conditions by tests of pairs" in refused.stderr


def test_a_campaign_is_compared_by_its_own_rules(tmp_path, cli):
    rules = {"alpha": 1e-4, "baseline": "maxrl", "ladder": []}
    directory = write_campaign(tmp_path / "c", conditions=("grpo", "maxrl"), failed=(), missing=(), **rules)
    for options in ((), ("--summary", "mean")):
        shown = cli("compare", str(directory), *options).stdout
        assert "grpo against maxrl" in shown
        assert "with 15 seeds the exact test can decide" in shown, "2^-14 is the largest power within its alpha"
