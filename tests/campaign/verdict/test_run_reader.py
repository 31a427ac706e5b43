"""Run directories and campaigns become tables: every planned cell has its result, or the reason for none."""

import csv
import json
import math

import pytest

from retrain.campaign import comparison
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import analyze, compare
from retrain.campaign.verdict.judging import Contrast
from retrain.campaign.verdict.results import Cell
from retrain.campaign.verdict.run_facts import row, write_tables
from retrain.campaign.verdict.run_reader import read_campaign, read_campaign_tables, read_runs
from retrain.errors import ConfigError
from tests.campaign.tables import CONDITIONS, write_campaign

SMALL = {"conditions": ("grpo", "maxrl"), "seeds": range(3), "steps": 40, "failed": (), "missing": ()}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Two conditions, four seeds; and the same runs under names of their own."""
    root = tmp_path_factory.mktemp("any")
    options = {"conditions": ("grpo", "maxrl"), "seeds": range(4), "steps": 40, "failed": (), "missing": ()}
    write_campaign(root / "one", **options)
    for label in ("grpo", "maxrl"):
        for seed in range(4):
            (root / f"run-{label}-s{seed}").symlink_to(root / "one" / "cells" / label / f"s{seed}")
    return root


def test_runs_of_one_configuration_are_one_condition_paired_by_seed(cells):
    found = read_runs(
        [cells / "one" / "cells" / label / f"s{seed}" for label in ("maxrl", "grpo") for seed in range(4)], Outcome()
    )
    assert found.conditions == ("maxrl", "grpo")
    assert found.baseline == "maxrl"
    assert not found.ladder
    (one,) = analyze([found]).comparisons
    assert (one.condition, one.against, one.seeds) == ("grpo", "maxrl", (0, 1, 2, 3))


def test_a_campaign_stands_for_its_runs(cells):
    found = read_runs([cells / "one"], Outcome())
    assert found.conditions == ("grpo", "maxrl")
    assert len(found.cells) == 8


def test_conditions_of_two_campaigns_under_one_label_keep_all_their_cells(cells, tmp_path):
    options = {"seeds": range(4), "steps": 40, "failed": (), "missing": (("grpo", 3),)}
    write_campaign(tmp_path / "c3", conditions=("grpo", "maxrl+gtpo"), **options)
    found = read_runs([cells / "one", tmp_path / "c3"], Outcome())
    assert found.conditions == ("one: grpo", "maxrl", "c3: grpo", "maxrl+gtpo")
    assert len(found.cells) == 16
    paths = {cell.path for cell in found.of("one: grpo")}
    assert paths == {cells / "one/cells/grpo" / f"s{seed}" for seed in range(4)}
    assert [cell.status for cell in found.of("c3: grpo")] == ["done", "done", "done", "missing"]
    assert {(one.condition, one.against) for one in analyze([found]).comparisons} >= {("c3: grpo", "one: grpo")}


def test_conditions_of_campaigns_of_one_name_are_numbered(tmp_path):
    for parent in ("x", "y", "z"):
        write_campaign(tmp_path / parent / "one", **SMALL)
    found = read_runs([tmp_path / parent / "one" for parent in ("x", "y", "z")], Outcome())
    assert found.conditions[::2] == ("one: grpo", "one: grpo (2)", "one: grpo (3)")
    assert len(found.cells) == 18


def test_two_runs_of_one_configuration_and_seed_are_refused(cells, tmp_path):
    again = tmp_path / "grpo-again-s1"
    again.symlink_to(cells / "one" / "cells" / "grpo" / "s1")
    paths = [cells / "one" / "cells" / label / f"s{seed}" for label in ("maxrl", "grpo") for seed in range(4)]
    problem = rf"{again}: RUNS: has the configuration and seed of {paths[5]}, .*; give one of them"
    with pytest.raises(ConfigError, match=problem):
        read_runs([*paths, again], Outcome())


def test_a_path_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contains no run"):
        read_runs([tmp_path], Outcome())


def test_any_metric_of_a_run_is_an_outcome(cells):
    paths = [cells / "one/cells" / label / f"s{seed}" for label in ("grpo", "maxrl") for seed in range(3)]
    last = read_runs(paths, Outcome(metric="sepa/lambda", goal="max"))
    mean = read_runs(paths, Outcome(metric="sepa/lambda", goal="max", summary="mean"))
    assert last.values("grpo") == [0.39] * 3, "of step 39, in metrics.jsonl"
    assert mean.values("grpo") == pytest.approx([0.195] * 3)
    assert 20 < read_runs(paths, Outcome(metric="tokens", goal="min")).values("grpo")[0] < 31, "in eval.jsonl"
    gone = read_runs(paths, Outcome(metric="other", goal="max"))
    assert gone.lost[0].reason == "neither eval.jsonl nor metrics.jsonl has 'other'"


def test_a_campaign_has_a_table_for_each_outcome(tmp_path):
    outcomes = [{"metric": "accuracy", "margin": 0.02}, {"metric": "tokens", "goal": "min"}]
    write_campaign(tmp_path / "a", **SMALL, outcomes=outcomes)
    tables = read_campaign_tables(tmp_path / "a")
    assert [(one.outcome.metric, one.outcome.sign, one.outcome.margin) for one in tables] == [
        ("accuracy", 1, 0.02),
        ("tokens", -1, None),
    ]
    with write_tables(tables, tmp_path)[0].open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["avg_tokens"]) == tables[1].runs[0].result
    assert float(rows[0]["tokens"]) == tables[1].runs[0].total[1], "the cost of the run"


def test_runs_that_were_measured_differently_are_not_compared(tmp_path):
    write_campaign(tmp_path / "a", **SMALL | {"conditions": ("grpo",)})
    write_campaign(tmp_path / "b", **SMALL | {"conditions": ("maxrl",), "effects": {"maxrl": 0.1}})
    changed = {
        ("model", "path"): "other/model",
        ("eval", "problems"): 64,
        ("eval", "every"): 5,
        ("training", "max_tokens"): 3,  # cuts evaluated answers as well
    }
    for file in (tmp_path / "b").glob("cells/*/*/config.resolved.json"):
        config = json.loads(file.read_text())
        for (section, key), value in changed.items():
            config[section][key] = value
        file.write_text(json.dumps(config))
    runs = [tmp_path / "a/cells/grpo/s0", tmp_path / "b/cells/maxrl/s0"]
    with pytest.raises(ConfigError, match=r"model\.path: the runs were measured differently") as caught:
        comparison.compare(runs)
    assert [one.key for one in caught.value.problems] == ["model.path", "training.max_tokens", "eval.problems"]
    assert 'grpo "builtin:tiny", maxrl "other/model"; compare runs of one task' in str(caught.value)
    with pytest.raises(ConfigError, match=r"eval.problems: the runs were measured differently"):
        comparison.compare(runs, comparison.Asked(allowed=("model.path",)))
    found = comparison.compare(runs, comparison.Asked(allowed=("model.path", "eval.problems", "training.max_tokens")))
    assert comparison.differing(found.first)[:3] == [
        "what differs",
        "                            grpo          maxrl",
        "  model.path                builtin:tiny  other/model",
    ]


def test_every_planned_cell_is_there_in_the_plans_order(results):
    assert results.conditions == tuple(CONDITIONS)
    assert results.baseline == "grpo"
    assert results.seeds == tuple(range(10))
    assert len(results.cells) == 50
    assert sorted(results.done("maxrl")) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    lost = {(cell.condition, cell.seed): (cell.status, cell.reason) for cell in results.lost}
    assert lost == {
        ("maxrl", 3): ("failed", "the loss was not finite in 5 steps (exit 4)"),
        ("maxrl+gtpo+sepa", 9): ("missing", "it was never started"),
    }
    assert all(cell.result is None and cell.area is None for cell in results.lost)


def test_how_a_cell_ended(tmp_path):
    write_campaign(tmp_path / "a", **SMALL | {"unfinished": (("grpo", 1), ("maxrl", 0))})
    cells = tmp_path / "a" / "cells"
    (cells / "maxrl/s0/status.json").write_text('{"outcome": "preempted"}')
    (cells / "maxrl/s1/eval.jsonl").write_text("")
    (cells / "maxrl/s2/outcome.json").unlink()
    (cells / "maxrl/s2/status.json").write_text('{"outcome": "diverged", "exit_code": 4}')
    (cells / "grpo/s2/outcome.json").unlink()
    (cells / "grpo/s2/status.json").write_text('{"outcome": "finished"}')
    found = read_campaign(tmp_path / "a").cells
    assert {key: (cell.status, cell.reason) for key, cell in found.items() if key != ("grpo", 0)} == {
        ("grpo", 1): ("unfinished", "it has not finished"),
        ("grpo", 2): ("done", ""),
        ("maxrl", 0): ("unfinished", "it has not finished"),
        ("maxrl", 1): ("failed", "it was never evaluated"),
        ("maxrl", 2): ("failed", "its status is diverged (exit 4)"),
    }


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("eval.jsonl", "accuracy", math.nan),
        ("eval.jsonl", "accuracy", None),
        ("metrics.jsonl", "time/step_s", -math.inf),
    ],
)
def test_a_run_with_a_number_that_is_not_finite_has_no_result(tmp_path, file, key, value):
    write_campaign(tmp_path / "a", **SMALL)
    path = tmp_path / "a/cells/maxrl/s1" / file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[0] | {key: value}, *rows[1:]]))
    cell = read_campaign(tmp_path / "a").cells["maxrl", 1]
    assert (cell.status, cell.result, cell.area) == ("failed", None, None)
    assert cell.reason == f"{file}: {key} of step {rows[0]['step']} is {value}"
    (compared,) = compare([Contrast(read_campaign(tmp_path / "a"), "maxrl", "grpo")], "baseline")
    assert compared.left_out == (1,)
    assert 0 < compared.judged.p <= 1


def test_area_threshold_and_what_was_spent():
    spent = tuple((float(8 * i), float(100 * i), 0.5 * i) for i in range(11))
    cell = Cell("grpo", 0, None, "done", curve=((0, 0.1), (4, 0.3), (10, 0.5)), spent=spent)
    assert cell.area == pytest.approx((4 * 0.2 + 6 * 0.4) / 10)
    assert [cell.reached(level) for level in (0.1, 0.2, 0.3, 0.45, 0.6)] == [0, 4, 4, 10, None]
    assert cell.total == (80.0, 1000.0, 5.0)
    assert cell.spent_after(4) == (32.0, 400.0, 2.0)
    found = row(cell, 0.3)
    assert " ".join(found) == (
        "condition seed status reason accuracy area avg_tokens steps rollouts tokens seconds reached "
        "steps_to_threshold rollouts_to_threshold tokens_to_threshold seconds_to_threshold host attempts path"
    )
    assert (found["steps"], found["reached"], found["steps_to_threshold"]) == (10, True, 4)
    assert (found["rollouts_to_threshold"], found["tokens_to_threshold"]) == (32.0, 400.0)
    assert row(cell, 0.6)["reached"] is False
    assert row(cell, 0.6)["seconds_to_threshold"] is None
    assert row(cell, None)["reached"] is None
    single = Cell("grpo", 0, None, "done", curve=((0, 0.1),))
    assert (single.area, single.result) == (None, 0.1)


def test_the_threshold_is_nine_tenths_of_the_baselines_way(tmp_path):
    plan = write_campaign(tmp_path / "a", **SMALL) / "plan.json"
    found = read_campaign(tmp_path / "a")
    runs = found.done("grpo").values()
    first, last = (sum(cell.curve[end][1] for cell in runs) / 3 for end in (0, -1))
    assert found.threshold == pytest.approx(0.1 * first + 0.9 * last)
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"alpha": 0.1}))
    assert read_campaign(tmp_path / "a").alpha == 0.1


def test_the_tables_hold_a_row_per_cell(results, tmp_path):
    files = write_tables([results], tmp_path)
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    assert rows[0]["condition"] == "grpo"
    assert float(rows[0]["accuracy"]) == results.cells["grpo", 0].result
    failed = next(one for one in rows if one["status"] == "failed")
    assert (failed["accuracy"], failed["reason"]) == ("", "the loss was not finite in 5 steps (exit 4)")
    from pyarrow import parquet

    stored = parquet.read_table(files[1]).to_pylist()
    assert [one["accuracy"] for one in stored if one["condition"] == "maxrl"][3] is None
    assert math.fsum(one["accuracy"] or 0 for one in stored) == pytest.approx(
        math.fsum(float(one["accuracy"] or 0) for one in rows)
    )


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no plan\.json"):
        read_campaign(tmp_path)


def test_a_run_whose_last_evaluation_is_not_of_its_end_has_no_result(tmp_path):
    write_campaign(tmp_path / "a", **SMALL)
    cells = tmp_path / "a" / "cells"
    file = cells / "maxrl/s1/eval.jsonl"
    file.write_text(file.read_text().split("\n")[0] + "\n")
    (cells / "maxrl/s2/metrics.jsonl").unlink()
    found = read_campaign(tmp_path / "a").cells
    ends = {key: (cell.status, cell.reason) for key, cell in found.items() if key[0] == "maxrl"}
    assert ends == {
        ("maxrl", 0): ("done", ""),
        ("maxrl", 1): ("failed", "no result: last evaluation after 0 of 40 steps"),
        ("maxrl", 2): ("failed", "no result: metrics.jsonl holds 0 of 40 steps"),
    }


def test_a_run_that_a_metric_has_ended_has_a_result(tmp_path):
    write_campaign(tmp_path / "a", **SMALL)
    cell = tmp_path / "a" / "cells" / "maxrl" / "s1"
    evals, steps = ((cell / name).read_text().splitlines() for name in ("eval.jsonl", "metrics.jsonl"))
    done = json.loads(evals[1])["step"]
    (cell / "eval.jsonl").write_text("\n".join(evals[:2]) + "\n")
    (cell / "metrics.jsonl").write_text("\n".join(steps[:done]) + "\n")
    (cell / "status.json").write_text(json.dumps({"outcome": "finished", "stopped": f"after {done} steps"}))
    found = read_campaign(tmp_path / "a").cells["maxrl", 1]
    assert (found.status, found.curve[-1][0]) == ("done", done)
