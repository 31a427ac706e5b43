"""The report card of a campaign with tasks: what it claims, what it does not, and that its statistics hold."""

import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict import card_page, statistics
from retrain.campaign.verdict.across_tasks import card_of, gain, report_card
from retrain.campaign.verdict.analysis import accuracy, differences
from retrain.campaign.verdict.results import Cell, read_campaign, table
from retrain.functional.seeds import derive_seed
from tests.campaign.tables import write_cell
from tests.report.test_run_page import checked

TASKS = {"rare": 0.09, "decoy": -0.06, "chain": 0.0}
"""Task -> what `new` adds to `grpo` there."""


def write_tasks(directory, seeds=range(9), missing=()):
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
    plan = {"tasks": list(TASKS), "baseline": "grpo", "ladder": [["new", "grpo"]], "premises": premises}
    (directory / "plan.json").write_text(json.dumps(plan | {"threshold": None, "alpha": 0.05, "cells": cells}))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("card"))


@pytest.mark.slow
def test_the_card_says_in_words_where_a_method_helps(directory):
    text, files = card_page.write(directory)
    pooled, first, overall, *premises = text.splitlines()
    assert pooled.startswith("new against grpo in the mean over tasks: +0.01")
    assert "], p = .0039, 9 seeds: better. Detectable with 80% power: ±0.00" in pooled
    assert first.startswith("new against grpo: helps on rare, where success comes in 1 % of samples (+0.0")
    assert "; harms on decoy, where phrases change nothing (-0.0" in first
    assert first.endswith("; is inconclusive with 9 seeds on 1 other task.")
    assert overall.startswith("Interquartile mean over all tasks: +0.0")
    assert premises == [
        "The premise of decoy does not hold: explained 0.300 (-0.02 to 0.02).",
        "The premise of chain was not measured: gap (0 to 0.1).",
    ]
    assert [file.name for file in files[:4]] == ["report.html", "report.md", "report.tex", "results.csv"]
    drawn = {file.name for file in files if file.suffix == ".svg"}
    curves = {f"learning-curves-{task}.svg" for task in TASKS}
    assert drawn == {"differences-new.svg", "performance-profile.svg", *curves}
    html = files[0].read_text(encoding="utf-8")
    words = checked(html)
    assert first in words
    assert html.count('class="forest"') == len(TASKS) + 1
    assert html.count('class="area c') == 2, "a band for each condition's profile"
    assert "Ten steps" not in words, "only the first letter is changed"
    links = re.findall(r'<a href="([^"]+)">0\.\d+</a>', html)
    assert len(links) == len(set(links)) == len(TASKS) * 2 * 9
    assert all((directory / unquote(link)).is_file() for link in links)
    assert html == card_page.write(directory)[1][0].read_text(encoding="utf-8")
    assert "rare: new" in files[3].read_text()
    assert first.replace("<", "&lt;") in files[1].read_text()


def test_one_family_over_all_tasks_and_numbers_that_are_those_of_the_tables(directory):
    card = report_card(directory)
    assert {one.size for one in card.comparisons.values()} == {3}
    found = card.comparisons["rare", "new"]
    table = read_campaign(directory, "rare")
    assert table.name.endswith(": rare")
    assert found.difference.value == pytest.approx(np.mean(differences(table.pairs("new", "grpo"), accuracy)))
    assert found.holm == pytest.approx(3 * 2 / 2**9)
    new = card.across["new"]
    assert new.gain.low < new.gain.value < new.gain.high
    assert 0 <= new.improvement.low <= new.improvement.value <= new.improvement.high <= 1
    assert math.isnan(card.across["grpo"].gain.value)
    share = new.profile[0]
    assert (share[0], share[-1]) == (1, 0)
    assert (np.diff(share) <= 0).all()


@pytest.mark.slow
def test_a_declared_claim_is_tested_alone_and_with_its_time(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "claim")
    plan = json.loads((tmp_path / "claim" / "plan.json").read_text())
    declared = {"at": "2026-11-25T02:00:00+00:00", "after": 0, "runs": 54, "sha256": "ab" * 32}
    more = {"primary": "new", "claim": "rare", "declared": declared}
    (tmp_path / "claim" / "plan.json").write_text(json.dumps(plan | more))
    card = report_card(tmp_path / "claim")
    assert {place: (one.family, one.size) for place, one in card.comparisons.items()} == {
        ("rare", "new"): ("primary", 1),
        ("decoy", "new"): ("tasks", 2),
        ("chain", "new"): ("tasks", 2),
    }
    assert card.comparisons["rare", "new"].holm == card.comparisons["rare", "new"].p
    first = card_page.words(card)[0]
    assert first.startswith("As declared, new against grpo on rare: +0.0")
    assert "better. The primary comparison, new against grpo on rare, was declared at 2026-11-25T02" in first
    assert "before any run had started" in first
    facts = card_page.as_json(card)
    assert facts["declaration"]["late"] is False
    assert facts["tests"] == (
        "There are 3 separate tests or families, each with a probability of a false claim of at most 5%: (1) the "
        "comparison in the mean over tasks; (2) the declared comparison; (3) the 2 other comparisons on single tasks, "
        "with Holm's correction. Together they make a false claim with a probability of at most 15%."
    )
    assert facts["tests"] in card_page.write(tmp_path / "claim")[1][1].read_text(encoding="utf-8")


def some_tables(effects, conditions=("grpo", "m")):
    """Results of seven seeds on each task; every condition but the first adds the task's effect."""
    rng, found = random.Random(0), {}
    for task, effect in effects.items():
        runs = [
            (one, seed, 0.5 + effect * (one != "grpo") + rng.gauss(0, 0.01)) for one in conditions for seed in range(7)
        ]
        cells = [Cell(one, seed, Path("none"), "done", curve=((0, 0.3), (60, final))) for one, seed, final in runs]
        found[task] = table(task, cells)
    return found


def test_a_claim_is_not_among_the_other_tasks():
    card = card_of("x", some_tables({"a": 0.03, "b": 0.0, "c": 0.0}), {}, ("a", "m"))
    first, _, other, *_ = card_page.words(card)
    assert first.startswith("As declared, m against grpo on a: +0.0")
    assert first.endswith("7 seeds: better.")
    assert other == "m against grpo: is inconclusive with 7 seeds on 2 other tasks."
    few = {task: replace(found, seeds=(0, 1, 2)) for task, found in some_tables({"a": 0.0, "b": 0.0}).items()}
    words = card_page.words(card_of("x", few, {}, ("a", "m")))
    assert "m against grpo: is inconclusive with 3 seeds on 1 other task." in words
    assert "With 3 seeds no result can be significant on 1 other task; use at least 6." in words


def test_a_claim_on_the_only_task_needs_no_further_sentence():
    card = card_of("x", some_tables({"a": 0.03}), {}, ("a", "m"))
    first, overall = card_page.words(card)
    assert first.startswith("As declared, m against grpo on a: ")
    assert overall.startswith("Interquartile mean: ")
    facts = card_page.as_json(card)
    assert facts["tests"] == "The probability of a false claim is at most 5% for the declared comparison."
    assert facts["pooled"] == []


def test_the_json_of_a_card_has_the_test_over_all_tasks():
    card = card_of("x", some_tables({"a": 0.03, "b": 0.02}, ("grpo", "m", "n")), {})
    facts = card_page.as_json(card)
    assert facts["declaration"] is None
    assert [(one["condition"], one["family"], one["size"], one["significant"]) for one in facts["pooled"]] == [
        ("m", "pooled", 2, True),
        ("n", "pooled", 2, True),
    ]
    assert facts["pooled"][0]["verdict"] == "better"
    assert "(1) the 2 comparisons in the mean over tasks, with Holm's correction;" in facts["tests"]
    assert "(2) the 4 comparisons on single tasks, with Holm's correction." in facts["tests"]
    assert facts["tests"].endswith("of at most 10%.")


@pytest.mark.slow
def test_a_late_claim_is_one_of_the_family_and_said_to_be_late(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "late")
    plan = json.loads((tmp_path / "late" / "plan.json").read_text())
    declared = {"at": "2026-11-25T02:00:00+00:00", "after": 18, "runs": 54, "sha256": "ab" * 32}
    more = {"primary": "new", "claim": "rare", "declared": declared | {"changed": ['claim "decoy" -> "rare"']}}
    (tmp_path / "late" / "plan.json").write_text(json.dumps(plan | more))
    card = report_card(tmp_path / "late")
    assert {(one.family, one.size) for one in card.comparisons.values()} == {("tasks", 3)}
    text, files = card_page.write(tmp_path / "late")
    first = text.splitlines()[0]
    assert first == (
        "The primary comparison, new against grpo on rare, was declared late, at 2026-11-25T02:00:00+00:00, after 18 "
        "of 54 runs had started (sha256 of the file: abababababab). It is therefore corrected like the other "
        'comparisons. Changed since runs had started: claim "decoy" -> "rare".'
    )
    assert "As declared" not in text
    assert first in checked(files[0].read_text(encoding="utf-8"))
    facts = card_page.as_json(card)["declaration"]
    assert (facts["late"], facts["started"], facts["runs"], facts["sentence"]) == (True, 18, 54, first)


def test_the_mean_over_tasks_needs_every_task_of_a_seed(tmp_path):
    card = report_card(write_tasks(tmp_path, range(6), missing=[("rare", "new", 1)]))
    one = card.pooled["new"]
    assert (one.seeds, one.left_out, one.size) == ((0, 2, 3, 4, 5), (1,), 1)
    by_task = [dict(zip(range(6), [0] * 6, strict=True)) for _ in TASKS]
    for found, (task, _) in zip(by_task, TASKS.items(), strict=True):
        for new, old in card.tables[task].pairs("new", "grpo"):
            found[new.seed] = (new.accuracy or 0.0) - (old.accuracy or 0.0)
    expected = np.mean([[found[seed] for seed in one.seeds] for found in by_task])
    assert one.difference.value == pytest.approx(expected)


def test_three_seeds_can_tell_nothing_and_a_lost_run_is_named(tmp_path):
    text, _ = card_page.write(write_tasks(tmp_path, range(3), missing=[("rare", "new", 1)]))
    first = text.splitlines()[1]
    assert first.startswith("new against grpo: may harm on decoy, where phrases change nothing (-0.0")
    assert first.endswith("; is inconclusive with 3 seeds on 2 other tasks.")
    assert "With 3 seeds no result can be significant on 3 tasks; use at least 7." in text
    assert "No result: rare, new seed 1 missing: it was never started." in text


@pytest.mark.slow
def test_a_task_without_a_pair_of_runs_is_not_said_to_be_inconclusive(tmp_path):
    text, files = card_page.write(write_tasks(tmp_path, missing=[("chain", "new", seed) for seed in range(9)]))
    pooled, first = text.splitlines()[:2]
    assert pooled == "new against grpo in the mean over tasks: no seed has results of both on every task."
    assert first.endswith("; cannot be compared on chain, where no seed has a result of both.")
    assert "is inconclusive with" not in text
    assert "Interquartile mean over 2 of 3 tasks: " in text
    assert "| chain | - | inconclusive |" in files[1].read_text(encoding="utf-8")


def test_a_method_that_changes_nothing_on_a_task_is_said_to(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "same")
    for run in (tmp_path / "same" / "cells" / "chain-new").iterdir():
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "same" / "cells" / "chain-grpo" / run.name, run)
    text, files = card_page.write(tmp_path / "same")
    first = text.splitlines()[1]
    assert "; makes no difference on chain, where its runs equal those of grpo" in first
    assert "inconclusive" not in first
    assert "| chain | +0.000 [+0.000, +0.000] | no difference |" in files[1].read_text(encoding="utf-8")


def test_a_table_of_all_tasks_names_them(directory):
    table = read_campaign(directory)
    assert table.conditions[:2] == ("rare: grpo", "rare: new")
    assert read_plan(directory).cells[1].method == "new"


def simulated(tasks: int, seeds: int, tables: int) -> tuple[float, float, float]:
    """Shares of simulated tables in which the intervals of the gain and of the probability of improvement hold the
    truth, and in which a difference is claimed where there is none. Runs of a seed have half of their noise in common.
    """
    rng = np.random.default_rng(tasks)
    found = np.zeros(3)
    for index in range(tables):
        base = rng.uniform(0.2, 0.9, size=(tasks, 1)) + rng.normal(size=(tasks, seeds)) * 0.02
        equal = base[..., None] + rng.normal(size=(tasks, seeds, 2)) * 0.02
        _, low, high = statistics.stratified([*(equal + np.array([0.02, 0.0]))], gain, index, 300, used=0.5)
        _, least, most = statistics.stratified([*equal], statistics.wins, index, 300, pairwise=True)
        p = [float(statistics.sign_flip(task[:, 0] - task[:, 1])) for task in equal]
        found += [low <= 0.02 <= high, least <= 0.5 <= most, min(statistics.holm(p)) <= 0.05]
    covered, beaten, claims = map(float, found / tables)
    return covered, beaten, claims


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "seeds", "tables"), [(10, 9, 300), (4, 3, 2000)])
def test_intervals_over_tasks_cover_and_few_false_claims_are_made(tasks, seeds, tables):
    covered, beaten, claims = simulated(tasks, seeds, tables)
    assert 0.93 <= covered <= 0.97
    assert 0.93 <= beaten <= 0.97
    assert claims <= 0.05


@pytest.mark.parametrize(("tasks", "seeds"), [(10, 9), (4, 6)])
def test_the_mean_over_tasks_errs_as_often_as_it_says_and_tells_more(tasks, seeds):
    """Coverage and false claims of the pooled test, and its power beside that of any task, at half a sd."""
    rng, tables = np.random.default_rng(seeds), 4000
    noise = rng.normal(size=(tables, tasks, seeds)) * 0.02 * np.sqrt(2)
    pooled = noise.mean(axis=1)
    low, high = statistics.mean_interval(pooled)
    assert 0.93 <= float(((low <= 0) & (high >= 0)).mean()) <= 0.97
    assert float((statistics.sign_flip(pooled) <= 0.05).mean()) <= 0.055
    some = statistics.sign_flip(noise[:400] + 0.014)
    any_task = np.mean([min(statistics.holm(row)) <= 0.05 for row in some.tolist()])
    together = float((statistics.sign_flip(pooled[:400] + 0.014) <= 0.05).mean())
    assert together > any_task + 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("starts", "seeds"), [(9, 9), (9, 18), (6, 12)])
@pytest.mark.parametrize("common", [True, False])
def test_intervals_over_tasks_cover_warm_starts(starts, seeds, common):
    """The gain of a method varies over warm starts (sd .03), in the same way on all tasks or in its own on each."""
    rng, tables, covered = np.random.default_rng(starts * seeds), 150, np.zeros(3)
    start = np.arange(seeds) % starts
    for index in range(tables):
        effects = np.tile(rng.normal(size=starts), (4, 1)) if common else rng.normal(size=(4, starts))
        strata = 0.5 + rng.normal(size=(4, seeds, 2)) * 0.01
        strata[..., 0] += 0.03 * effects[:, start]
        for which, (statistic, true) in enumerate(((gain, 0.0), (statistics.wins, 0.5))):
            _, low, high = statistics.stratified_by_start([*strata], [start] * 4, statistic, index, 200)
            covered[which] += low <= true <= high
        _, low, high = statistics.stratified([*strata], gain, index, 200, used=0.5)
        covered[2] += low <= 0 <= high
    assert (covered[:2] / tables >= 0.9).all()
    if common:
        assert covered[2] / tables < 0.85, "drawing single runs would miss the starts"


def test_whole_starts_are_drawn_and_a_task_without_runs_of_them_is_left_out():
    calls = []

    def first(strata):
        calls.append([stratum.shape for stratum in strata])
        return strata[0].mean((-1, -2))

    strata, starts = [[[1.0], [2.0], [6.0]], [[0.0]]], [[0, 0, 1], [0]]
    value, low, high = statistics.stratified_by_start(strata, starts, first, 0, 1000)
    wider = math.sqrt(2) * 12.706 / 1.96
    assert value == 3
    assert (low, high) == pytest.approx((3 - wider * 1.5, 3 + wider * 3), rel=1e-3)
    assert sum(shapes[0][0] for shapes in calls[1:]) == 1000
    assert sorted([shape[1] for shape in shapes] for shapes in calls[1:]) == [[2], [3, 1], [4, 2]]
    one = statistics.stratified_by_start([[[1.0], [3.0]]], [[4, 4]], first, 0)
    assert one[0] == 2
    assert all(map(math.isnan, one[1:]))


def test_the_card_draws_warm_starts_where_there_are_several(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "starts")
    plan = json.loads((tmp_path / "starts" / "plan.json").read_text())
    (tmp_path / "starts" / "plan.json").write_text(json.dumps(plan | {"warm_starts": 3}))
    card, single = report_card(tmp_path / "starts"), report_card(directory)
    found = card.across["new"]
    rows = [[[a.accuracy, b.accuracy] for a, b in table.pairs("new", "grpo")] for table in card.tables.values()]
    expected = statistics.stratified_by_start(rows, [[0, 1, 2] * 3] * 3, gain, derive_seed(0, "gain", "new", "grpo"))
    assert (found.gain.value, found.gain.low, found.gain.high) == pytest.approx(expected)
    assert found.gain != single.across["new"].gain
    assert (found.profile[0] == single.across["new"].profile[0]).all()
    assert "whole warm starts" in card_page.latex(card)
    assert "whole warm starts" not in card_page.latex(single)


def test_stratified_worked_by_hand():
    value, low, high = statistics.stratified([[[1.0], [3.0]], [[5.0]]], lambda s: s[0].mean((-1, -2)), 0)
    assert value == 2
    assert low < 2 < high
    assert [*map(float, statistics.wins([np.array([[[0.5, 0.4], [0.2, 0.5]]])]))] == [0.375]
    assert all(map(math.isnan, statistics.stratified([[[1.0]]], lambda s: s[0].mean((-1, -2)), 0)[1:]))
