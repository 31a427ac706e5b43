"""Tables that have no verdict, and what every output says instead."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from retrain.campaign import comparison
from retrain.campaign.verdict import sentences, verdict_page
from retrain.campaign.verdict.results import Cell, results_of
from retrain.campaign.verdict.verdict_page import write_report
from retrain.campaign.verdict.withholding import trained_nothing
from retrain.errors import ConfigError
from tests.campaign.tables import write_campaign

BASE = np.random.default_rng(0).normal(0.45, 0.02, 8)
BETTER = BASE + np.random.default_rng(1).normal(0.06, 0.004, 8)


def csv_of(values, metric="accuracy", task=None):
    """Rows of a file with a run for each method and seed."""
    head = f"method,seed,{metric}" + ",task" * bool(task)
    rows = [
        f"{m},{seed},{value}" + f",{task}" * bool(task) for m, own in values.items() for seed, value in enumerate(own)
    ]
    return "\n".join([head, *rows])


def answers(tmp_path, text, **options):
    """The comparisons, and the text of terminal, page and paper."""
    (tmp_path / "t.csv").write_text(text)
    found = comparison.compare([tmp_path / "t.csv"], comparison.Asked(**options))
    page = re.sub(r"<[^>]+>", "", verdict_page.render(found, [])).replace("&#39;", "'")
    return found.comparisons, [
        verdict_page.text(found),
        page,
        verdict_page.paper(found),
        json.dumps(sentences.as_json(found)),
    ]


def replaced(values, seed, value):
    return [value if index == seed else old for index, old in enumerate(values)]


NOTHING = "all 8 runs of b trained nothing:"


SPAN = r"[\d.]+ to [\d.]+"


@pytest.mark.parametrize(
    ("values", "metric", "reason"),
    [
        ({"b": replaced(BETTER, 3, 47)}, "accuracy", rf"b seed 3 is 47 beside {SPAN}: different units?"),
        ({"b": replaced(BETTER, 3, 47)}, "reward", rf"b seed 3 is 47 beside {SPAN}: different units?"),
        ({"b": BETTER * 4.2}, "accuracy", rf"b is {SPAN} beside {SPAN}: different units?"),
        ({"b": BETTER * 100}, "score", rf"b is {SPAN} beside {SPAN}: different units?"),
        ({"a": BASE * 100, "b": replaced(BETTER * 100, 0, 0.5)}, "acc", rf"b seed 0 is 0.5 beside {SPAN}: different"),
        ({"b": [0] * 8}, "accuracy", f"{NOTHING} accuracy is 0 in every evaluation, its floor"),
        ({"b": [1] * 8}, "accuracy", f"{NOTHING} accuracy is 1 in every evaluation, its ceiling"),
    ],
)
def test_a_verdict_is_withheld_with_its_reason_in_every_output(tmp_path, values, metric, reason):
    (one,), outputs = answers(tmp_path, csv_of({"a": BASE} | values, metric))
    assert sentences.short(one) == "no verdict"
    for text in outputs:
        assert re.search(reason, text), text


@pytest.mark.parametrize(
    ("values", "metric"),
    [
        ({"a": BASE * 100, "b": BETTER * 100}, "accuracy"),
        ({"a": BASE, "b": BETTER + 0.8}, "reward"),
        ({"a": BASE * 400, "b": BETTER * 400}, "reward"),
        ({"a": replaced(BASE, 0, 0), "b": BETTER}, "accuracy"),
    ],
)
def test_values_of_one_unit_have_a_verdict(tmp_path, values, metric):
    (one,), _ = answers(tmp_path, csv_of(values, metric))
    assert sentences.short(one) == "better"


def test_one_foreign_run_leaves_other_comparisons_their_verdict(tmp_path):
    found, _ = answers(tmp_path, csv_of({"a": BASE, "b": BETTER, "c": replaced(BETTER, 3, 47)}))
    assert [sentences.short(one) for one in found] == ["better", "no verdict"]


def test_tasks_of_different_units_have_no_mean(tmp_path):
    arena = csv_of({"a": BASE * 2500, "b": BETTER * 2500}, "score", "arena")
    text = csv_of({"a": BASE, "b": BETTER}, "score", "gsm8k") + "\n" + arena.partition("\n")[2]
    (pooled, *tasks), outputs = answers(tmp_path, text)
    assert [sentences.short(one) for one in (pooled, *tasks)] == ["no verdict", "better", "better"]
    for text in outputs:
        assert re.search(r"tasks of different units have no mean: gsm8k 0.\d+ to 0.\d+, arena 1\d+ to 1\d+", text), text


def test_a_margin_beyond_the_values_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"--margin: a margin of 2 is beyond the range of the values, 0.4"):
        answers(tmp_path, csv_of({"a": BASE, "b": BETTER}), margin=2.0)
    (one,), _ = answers(tmp_path, csv_of({"a": BASE * 100, "b": BASE * 100 + 0.1}), margin=2.0)
    assert sentences.short(one) in ("better", "equal within 2")


@pytest.mark.parametrize(("evaluations", "count"), [(2, 0), (3, 1)])
def test_two_equal_evaluations_of_a_share_may_be_chance(evaluations, count):
    run = Cell("a", 0, Path(), "done", curve=tuple((step, 154 / 512) for step in range(evaluations)))
    assert trained_nothing(results_of("t", [run]), "a")[0] == count


IDLE = {"update/skipped": 1.0}
FINDING = "none of the last 10 steps changed the weights: 80 groups were all wrong and 0 all right"


def idle_campaign(directory, idle, findings=True):
    """A campaign of two conditions in which no step of some runs changed the weights."""
    write_campaign(directory, conditions=("grpo", "maxrl"), seeds=range(8), steps=40, failed=(), missing=())
    for place in idle:
        run = directory / "cells" / place
        rows = [json.loads(line) | IDLE for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = [{"name": "no_update", "step": 10, "text": FINDING, "page": ""}] if findings else []
        (run / "status.json").write_text(json.dumps({"outcome": "finished", "findings": found}))
    return directory


def test_a_condition_that_never_trained_has_no_verdict(tmp_path):
    report = write_report(idle_campaign(tmp_path / "c", [f"maxrl/s{seed}" for seed in range(8)]))
    (one,) = report.analysis.comparisons
    assert sentences.short(one) == "no verdict"
    for text in (report.text, *(file.read_text().replace("\\_", "_") for file in report.files[:3])):
        assert f"all 8 runs of maxrl trained nothing: {FINDING}" in text
        assert "findings of maxrl: no_update in 8 of 8 runs" in text


def test_runs_that_never_trained_count_among_others(tmp_path):
    report = write_report(idle_campaign(tmp_path / "c", ["maxrl/s1", "maxrl/s5"], findings=False))
    (one,) = report.analysis.comparisons
    assert sentences.short(one) == "better"
    assert "2 of 8 runs of maxrl trained nothing: no step changed the weights" in report.text
