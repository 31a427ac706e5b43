"""The report card of a campaign with tasks: its families, its mean over tasks, premises and controls."""

import json
import random
import re
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pytest

from retrain.campaign import comparison
from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.run_reader import read_campaign_tables
from retrain.campaign.verdict.sentences import conclusion, note, short
from retrain.campaign.verdict.statistics import max_t, mean_of
from retrain.campaign.verdict.verdict_page import write_report
from tests.campaign.tables import write_cell
from tests.report.test_run_page import checked

TASKS = {"rare": 0.09, "decoy": -0.06, "chain": 0.0}
"""Task -> what `new` adds to `grpo` there."""


def write_tasks(directory, seeds=range(9), missing=(), **plan):
    """A campaign with tasks, written as the runner writes it."""
    cells = []
    for seed in seeds:
        for task, effect in TASKS.items():
            shared = random.Random(f"{seed} {task}").gauss(0, 0.02)
            for method in ("grpo", "new"):
                rng = random.Random(f"{seed} {task} {method}")
                path = f"cells/{task}-{method}/s{seed}"
                job = {"id": f"{task}-{method}/s{seed}", "condition": f"{task}: {method}", "seed": seed, "path": path}
                cells.append(job | {"max_steps": 40, "task": task})
                if (task, method, seed) in missing:
                    continue
                final = 0.5 + shared + (effect if method == "new" else 0.0) + rng.gauss(0, 0.01)
                write_cell(directory / path, "grpo", seed, final, rng, range(0, 41, 20), 40)
                (directory / path / "outcome.json").write_text(json.dumps({"status": "done", "exit_code": 0}))
                file = directory / path / "eval.jsonl"
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                rows[0] |= {"task/explained": 0.3}
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    premises = {
        "rare": {"about": "Success comes in 1 % of samples: much of it.", "bounds": {"accuracy": [0.0, 0.4]}},
        "decoy": {"about": "Phrases change nothing: <b>none</b>.", "bounds": {"task/explained": [-0.02, 0.02]}},
        "chain": {"about": "Ten steps.", "bounds": {"task/gap": [0, 0.1]}},
    }
    stored = {"tasks": list(TASKS), "baseline": "grpo", "ladder": [["new", "grpo"]], "premises": premises}
    (directory / "plan.json").write_text(json.dumps(stored | {"alpha": 0.05, "cells": cells} | plan))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("card"))


@pytest.mark.slow
def test_the_card_has_a_line_for_the_mean_and_for_every_task(directory):
    for status in directory.glob("**/cells/**/status.json"):
        status.with_name("report.html").touch()
    report = write_report(directory)
    lines = report.text.splitlines()
    assert lines[0] == "All 54 runs finished. 1 of 1 condition measured in the mean over tasks: 1 better."
    shown = {re.split(r"  +", line)[1]: line for line in lines if line[:1] in [*"▲▼○"]}
    assert [*shown] == [
        f"new against grpo {where}" for where in ("in the mean over tasks", *(f"on {t}" for t in TASKS))
    ]
    assert shown["new against grpo on rare"].startswith("▲ better")
    assert shown["new against grpo on decoy"].startswith("▼ worse")
    assert shown["new against grpo on chain"].startswith("○ inconclusive")
    assert "  the premise of decoy does not hold: explained 0.300 (-0.02 to 0.02)" in lines
    assert "  the premise of chain was not measured: gap (0 to 0.1)" in lines
    assert [file.name for file in report.files[:4]] == ["report.html", "report.md", "report.tex", "results.csv"]
    drawn = {file.name for file in report.files if file.suffix == ".svg"}
    assert drawn == {"differences.svg", *(f"learning-curves-{task}-all-conditions.svg" for task in TASKS)}
    html = report.files[0].read_text(encoding="utf-8")
    words = checked(html)
    assert "success comes in 1 % of samples" in words
    assert html.count('class="forest"') == 1 + len(TASKS) + 1
    links = re.findall(r'<a href="([^"]+)">0\.\d+</a>', html)
    assert len(links) == len(set(links)) == len(TASKS) * 2 * 9
    assert all((directory / unquote(link)).is_file() for link in links)
    assert html == write_report(directory).files[0].read_text(encoding="utf-8")
    assert "rare: new" in report.files[3].read_text()
    assert "| new against grpo on rare |" in report.files[1].read_text()


def test_numbers_are_those_of_the_tables(directory):
    tables = read_campaign_tables(directory)
    pooled, *found = analyze(tables).comparisons
    pairs = [[(a.result or 0) - (b.result or 0) for a, b in table.pairs("new", "grpo")] for table in tables]
    assert [one.judged.corrected for one in found] == max_t(pairs, [0.5 / 512] * 3)
    assert {one.size for one in found} == {3}
    assert pooled.difference == pytest.approx(
        mean_of([float(np.mean(row)) for row in zip(*pairs, strict=True)]).interval()
    )
    assert (pooled.family, pooled.size) == ("pooled", 1)


def test_another_metric_of_a_campaign_is_compared_task_by_task_and_was_not_declared(directory):
    found = comparison.compare([directory], comparison.Asked(metric="tokens", goal="min")).comparisons
    assert [(one.task, one.condition, one.against) for one in found] == [
        (task, "new", "grpo") for task in ("all tasks", *TASKS)
    ]
    plan = json.loads((directory / "plan.json").read_text())
    declared = {"at": "2026-01-01T00:00:00+00:00", "after": 0, "sha256": "0" * 64, "runs": 54, "terms": {}}
    (directory / "plan.json").write_text(json.dumps(plan | {"primary": "new", "claim": "rare", "declared": declared}))
    families = [
        {one.family for one in comparison.compare([directory], comparison.Asked(margin=margin)).comparisons}
        for margin in (None, 0.02)
    ]
    (directory / "plan.json").write_text(json.dumps(plan))
    assert families == [{"primary", "pooled", "tasks"}, {"pooled", "tasks"}]


def test_controls_are_families_of_their_own_and_take_no_power(directory, tmp_path):
    tables = []
    for table in read_campaign_tables(directory):
        copies = {("other", cell.seed): replace(cell, condition="other") for cell in table.of("new")}
        tables.append(replace(table, cells={**table.cells, **copies}, conditions=(*table.conditions, "other")))
    together = analyze(tables).comparisons
    apart = analyze([replace(table, controls=("other",)) for table in tables]).comparisons
    sizes = lambda found: {one.family: one.size for one in found}  # noqa: E731
    assert sizes(together) == {"pooled": 2, "tasks": 6}
    assert sizes(apart) == {"pooled": 1, "tasks": 3, "pooled of controls": 1, "tasks of controls": 3}
    assert "there are 4 families" in note(analyze([replace(table, controls=("other",)) for table in tables]))


@pytest.mark.parametrize("effect", [-0.05, 0.0, 0.05])
def test_a_placebo_is_compared_with_its_method_and_says_what_is_not_shown(directory, effect):
    tables = []
    for table in read_campaign_tables(directory):
        noise = random.Random(table.task)
        copies = {
            ("new shuffled", cell.seed): replace(
                cell, condition="new shuffled", curve=((40, cell.result + effect + noise.gauss(0, 0.005)),)
            )
            for cell in table.of("new")
        }
        facts = {"controls": ("new shuffled",), "control_of": {"new shuffled": "new"}}
        conditions = (*table.conditions, "new shuffled")
        tables.append(replace(table, cells={**table.cells, **copies}, conditions=conditions, **facts))
    found = [one for one in analyze(tables).comparisons if one.family.endswith("of controls")]
    assert {(one.condition, one.against) for one in found} == {("new shuffled", "new")}
    words = {-0.05: "worse", 0.0: "inconclusive", 0.05: "better"}
    for one in found:
        assert short(one) == words[effect]
        assert ("so new is not shown to be better than this control" in conclusion(one)) is (effect >= 0)


@pytest.mark.slow
def test_a_claim_about_one_task_is_tested_alone(tmp_path):
    declared = {"at": "2026-01-01T00:00:00+00:00", "after": 0, "sha256": "0" * 64, "runs": 54, "terms": {}}
    directory = write_tasks(tmp_path, primary="new", claim="rare", declared=declared)
    first, *others = analyze(read_campaign_tables(directory)).comparisons
    assert (first.family, first.task, first.size) == ("primary", "rare", 1)
    assert conclusion(first).startswith("better (tested alone, as declared; p = .0039)")
    assert {one.family: one.size for one in others} == {"pooled": 1, "tasks": 2}
    late = write_tasks(tmp_path / "late", primary="new", claim="rare", declared=declared | {"after": 3})
    assert {one.family for one in analyze(read_campaign_tables(late)).comparisons} == {"pooled", "tasks"}


@pytest.mark.slow
def test_a_task_without_a_pair_of_runs_has_no_verdict(tmp_path):
    report = write_report(write_tasks(tmp_path, missing=[("chain", "new", seed) for seed in range(9)]))
    found = {one.task: one for one in report.analysis.comparisons}
    assert (short(found["chain"]), short(found["all tasks"])) == ("no pair", "no pair")
    assert short(found["rare"]) == "better"
    assert "9 more runs without a result" not in report.text
    assert report.text.count("no result: chain, new seed") == 9
