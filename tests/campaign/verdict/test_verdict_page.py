"""The report of a campaign is complete, self-contained, stable, and lets no foreign text out of its quotes."""

import json
import re
from urllib.parse import unquote

import pytest

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.credit_map import credit_map
from retrain.campaign.verdict.results_file import read_results_file
from retrain.campaign.verdict.run_facts import environments, what_differs
from retrain.campaign.verdict.run_reader import read_campaign
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.campaign.verdict.sentences import short, title, why
from retrain.campaign.verdict.verdict_page import exported, render, write_report
from retrain.errors import StorageError
from tests.campaign.tables import write_campaign
from tests.report.test_run_page import HOSTILE, checked

SMALL = {"seeds": range(3), "steps": 40, "failed": (), "missing": ()}


@pytest.mark.slow
def test_the_report_is_well_formed_complete_and_stable(campaign, results):
    report = write_report(campaign)
    html = report.files[0].read_text(encoding="utf-8")
    words = checked(html)
    assert [file.name for file in report.files[:4]] == ["report.html", "report.md", "report.tex", "results.csv"]
    drawn = {file.name: file for file in report.files if file.suffix == ".svg"}
    assert {"differences.svg", "learning-curves-all-conditions.svg", "result-and-tokens.svg"} < {*drawn}
    assert "maxrl against grpo" in drawn["differences.svg"].read_text(encoding="utf-8")
    assert html == write_report(campaign).files[0].read_text(encoding="utf-8")
    for one in report.analysis.shown:
        assert title(one) in words
        assert short(one) in words
        assert why(one) in words
        assert title(one) in report.text
    for part in (
        "48 of 50 runs finished. 4 of 4 changes measured: 2 better, 1 worse, 1 inconclusive.",
        "maxrl seed 3 failed: the loss was not finite in 5 steps (exit 4)",
        "missing",
        "Learning curves",
        "Cost and result",
        "Where the credit goes",
        "algorithm.transform_mode",
        "packages.torch",
        "retrain campaign",
        "9 of 10",
    ):
        assert part in words, part
    # Lines of the ladder and of the baseline, their axis, kinds of verdicts, curves, costs, keys of two legends.
    assert html.count("<svg") == 4 + 3 + 1 + 5 + 6 + 2 + 2 * 5
    assert "nan" not in re.sub(r"<pre>.*?</pre>", "", html)
    assert "default-src 'none'" in html


@pytest.mark.slow
def test_the_report_leads_to_those_of_its_runs_and_shows_means_under_the_pointer(tmp_path):
    directory = write_campaign(tmp_path / "two", conditions=("grpo", "maxrl+gtpo"), **SMALL)
    cells = sorted((directory / "cells").glob("*/s*"))
    for cell in cells[1:]:
        (cell / "report.html").touch()
    html = write_report(directory).files[0].read_text(encoding="utf-8")
    checked(html)
    links = re.findall(r'<a href="([^"]+)">0\.\d+</a>', html)
    assert len(links) == len(cells) - 1, "a run whose worker wrote no report"
    assert all((directory / unquote(link)).is_file() for link in links)
    assert "cells/maxrl%2Bgtpo/s1/report.html" in links
    assert re.search(r"<title>step 40: grpo [\d.]+%, maxrl\+gtpo [\d.]+%</title>", html)


def test_the_markdown_has_the_verdict_and_every_run(campaign, results):
    text = write_report(campaign).files[1].read_text()
    assert text.startswith("# ladder\n\n48 of 50 runs finished.")
    assert "| maxrl | 0.447 | 0.494 | 0.488 | failed |" in text
    assert "- no result: maxrl+gtpo+sepa seed 9 missing: it was never started" in text
    assert text.count("\n| ") == (1 + 1 + 7) * 2 + (2 + 5) * 3


def test_credit_is_that_of_every_conditions_own_pipeline_on_the_same_completions(results):
    found = credit_map(results)
    assert (found.condition, found.seed, found.step) == ("grpo", 0, 100)
    assert [row["reward"] for row in found.rows] == [1.0, 1.0, 0.0]
    assert found.skipped == {}
    grpo, maxrl = found.advantages["grpo"], found.advantages["maxrl"]
    assert grpo == [[reward] * len(row["tokens"]) for reward, row in zip((0.5, 0.5, -0.5), found.rows, strict=True)]
    assert maxrl[0] == pytest.approx([1.0] * len(maxrl[0]), rel=1e-5)  # over the mean reward of one half
    gtpo, hicra = found.advantages["maxrl+gtpo"][0], found.advantages["maxrl+gtpo+hicra"][0]
    assert len(set(gtpo)) > 5
    planning = found.rows[0]["planning"]
    assert 1 in planning
    assert all((a != b) == bool(plan) for a, b, plan in zip(hicra, gtpo, planning, strict=True))
    sepa = found.advantages["maxrl+gtpo+sepa"][0]  # its weight is 1 at step 100: execution tokens are pooled
    assert len({round(value, 5) for value, plan in zip(sepa, planning, strict=True) if not plan}) == 1


def test_what_only_the_model_can_tell_is_said_and_left_out(cwd):
    directory = write_campaign(cwd / "a", **SMALL)
    changes = {
        "maxrl": {"uncertainty_kind": "shannon_entropy", "transform_mode": "gtpo"},
        "maxrl+gtpo": {"advantage_mode": "gone.py:missing"},
        "maxrl+gtpo+hicra": {"transform_mode": "broken:credit"},
        "maxrl+gtpo+sepa": {"advantage_mode": "remax", "transform_mode": "none"},
    }
    (cwd / "broken.py").write_text("def credit(ctx):\n    raise ValueError('<b>no</b>')\n")
    for label, change in changes.items():
        for file in directory.glob(f"cells/{label}/s*/config.resolved.json"):
            config = json.loads(file.read_text())
            config["algorithm"] |= change
            file.write_text(json.dumps(config))
    found = credit_map(read_campaign(directory))
    assert list(found.advantages) == ["grpo", "maxrl+gtpo+sepa"]
    # The stored reward of the greedy completion, 0.25, is the baseline.
    assert {value for row in found.advantages["maxrl+gtpo+sepa"] for value in row} == {0.75, -0.25}
    assert found.skipped["maxrl"] == "it reads entropy, which only the model can compute"
    assert found.skipped["maxrl+gtpo"] == "its configuration no longer loads"
    assert "no" in found.skipped["maxrl+gtpo+hicra"]
    checked(render(analyze([read_campaign(directory)]), []))


def test_a_campaign_that_has_just_begun_has_a_report(tmp_path):
    directory = write_campaign(tmp_path / "a", **SMALL | {"unfinished": [("grpo", 0)]})
    for cell in directory.glob("cells/*/s*"):
        if cell.parent.name != "grpo" or cell.name != "s0":
            for file in ("config.resolved.json", "outcome.json", "status.json", "eval.jsonl", "environment.json"):
                (cell / file).unlink()
    report = write_report(directory)
    words = checked(report.files[0].read_text())
    assert "0 of 15 runs finished" in words
    assert "no seed in both" in words
    assert "grpo seed 0 unfinished: it has not finished" in words
    assert "Where the credit goes" not in words
    assert "Learning curves" not in words


@pytest.mark.parametrize("name", ["figures", "report.html"])
def test_a_report_is_not_written_where_a_link_leads(tmp_path, name):
    directory, elsewhere = write_campaign(tmp_path / "a", **SMALL), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (directory / name).symlink_to(elsewhere)
    with pytest.raises(StorageError, match=f"{name} is a link"):
        write_report(directory)
    assert not [*elsewhere.iterdir()]


def test_hostile_text_stays_text(tmp_path):
    conditions = ("grpo", HOSTILE.replace("/", "|"))
    effects = dict.fromkeys(conditions, 0.0)
    directory = write_campaign(tmp_path / "a", **SMALL | {"conditions": conditions, "effects": effects})
    (directory / "campaign.toml").write_text(f"# {HOSTILE}")
    for file in directory.glob("cells/*/s1/outcome.json"):
        file.write_text(json.dumps({"status": "failed", "reason": HOSTILE}))
    html = write_report(directory).files[0].read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert HOSTILE in checked(html)
    assert "<script" not in (directory / "report.md").read_text().split("```")[0]


def test_configurations_differ_where_they_differ(results):
    assert what_differs(results) == {
        "algorithm.advantage_mode": {"grpo": '"grpo"'} | dict.fromkeys(results.conditions[1:], '"maxrl"'),
        "algorithm.transform_mode": dict(
            zip(results.conditions, ('"none"', '"none"', '"gtpo"', '"gtpo_hicra"', '"gtpo_sepa"'), strict=True)
        ),
    }


def test_environments_are_counted(results, tmp_path):
    assert environments(results)["packages.torch"] == {"2.13.0": 49}
    directory = write_campaign(tmp_path / "a", **SMALL)
    file = directory / "cells/grpo/s0/environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"python": "3.12.0"}))
    found = read_campaign(directory)
    assert environments(found)["python"] == {"3.11.7": 14, "3.12.0": 1}
    assert "3.11.7 (14 runs); 3.12.0 (1 run)" in checked(render(analyze([found]), []))


def test_the_findings_of_runs_are_counted(tmp_path):
    directory = write_campaign(tmp_path / "found", conditions=("grpo", "maxrl"), **SMALL)
    assert "findings of" not in render(analyze([read_campaign(directory)]), [])
    finding = {"step": 10, "text": "a text", "page": "a page"}
    names = {"grpo/s0": ["cut_off", "nothing_learned"], "grpo/s1": ["nothing_learned"], "maxrl/s0": []}
    for place, found in names.items():
        facts = {"outcome": "finished", "findings": [finding | {"name": name} for name in found]}
        (directory / "cells" / place / "status.json").write_text(json.dumps(facts))
    report = write_report(directory)
    line = "findings of grpo: nothing_learned in 2 of 3 runs, cut_off in 1 of 3 runs"
    for text in (report.text, *(file.read_text() for file in report.files[:3])):
        assert line in text.replace("\\_", "_")
        assert "findings of maxrl" not in text


def test_the_first_outcome_is_drawn_over_the_second(tmp_path):
    lengths = {"grpo": 40, "dca": 36}
    lines = [f"{name},{seed},{0.7 + seed / 100},{lengths[name] + seed}" for name in lengths for seed in range(3)]
    (tmp_path / "runs.csv").write_text("\n".join(["condition,seed,accuracy,avg_tokens", *lines]))
    file = tmp_path / "runs.csv"
    rows = read_results_file(file)
    outcomes = Outcome(), Outcome(metric="avg_tokens", goal="min")
    drawn = exported(analyze([table for outcome in outcomes for table in runs_of_file(file, rows, outcome)]))
    chart = drawn["result and accuracy over avg_tokens"].svg
    (long, high), (brief, same) = re.findall(
        r'<path class="center c\d" transform="translate\(([\d.]+) ([\d.]+)\)', chart
    )
    assert float(brief) < float(long), "36 tokens are to the left of 40"
    assert same == high, "both have the same accuracy"
    assert not [name for name in drawn if "Tokens" in name], "what these runs cost is not known"
