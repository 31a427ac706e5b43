"""Comparisons recover the differences that the table was made with, and say what they cannot."""

import math
from dataclasses import replace

import numpy as np
import pytest

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Estimate, analyze, compare, mean_estimate, summarize
from retrain.campaign.verdict.campaign_page import _forests
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.sentences import as_json, conclusion, headline, note, sentence, tables, text
from tests.campaign.tables import EFFECTS
from tests.reference import statistics as reference


def simulated(accuracies: dict[str, list[float | None]], **more) -> Results:
    """A table of runs of one evaluation; None: the run failed."""
    cells = {
        (label, seed): Cell(label, seed, None, "failed" if value is None else "done", curve=((0, 0.1), (10, value)))
        for label, values in accuracies.items()
        for seed, value in enumerate(values)
    }
    seeds = tuple(range(max(map(len, accuracies.values()))))
    labels = tuple(accuracies)
    ladder = tuple(zip(labels[1:], labels, strict=False))
    return Results("t", labels, labels[0], seeds, cells, **{"ladder": ladder} | more)


def test_the_families_are_the_ladder_and_the_baseline(results):
    found = analyze(results)
    labels = list(EFFECTS)
    assert [(one.condition, one.against) for one in found.ladder] == list(zip(labels[1:], labels, strict=False))
    assert [(one.condition, one.against) for one in found.baseline] == [(label, "grpo") for label in labels[1:]]
    assert all(one.size == 4 for one in (*found.ladder, *found.baseline))


def test_known_differences_are_found_and_estimated(results):
    for one in (*analyze(results).ladder, *analyze(results).baseline):
        true = EFFECTS[one.condition] - EFFECTS[one.against]
        assert one.difference.low - 0.01 < true < one.difference.high + 0.01
        assert one.significant == (abs(true) > 0.02)
        assert one.difference.low < one.difference.value < one.difference.high


def test_a_comparison_equals_the_reference(results):
    found = analyze(results)
    pairs = [
        [results.done(one.condition)[seed].accuracy - results.done(one.against)[seed].accuracy for seed in one.seeds]
        for one in found.baseline
    ]
    p_values = [reference.sign_flip(differences) for differences in pairs]
    for one, differences, p, holm in zip(found.baseline, pairs, p_values, reference.holm(p_values), strict=True):
        assert one.difference.value == pytest.approx(np.mean(differences), abs=1e-12)
        assert (one.difference.low, one.difference.high) == pytest.approx(reference.t_interval(differences), abs=1e-9)
        assert (one.p, one.holm) == pytest.approx((p, holm), abs=1e-12)
        assert one.effect == pytest.approx(reference.hedges(differences), rel=1e-9)


def test_the_aes_is_described_where_lengths_differ():
    table = simulated({"base": [0.5, 0.5, 0.4], "short": [0.5, 0.55, 0.4], "equal": [0.6, 0.5, 0.5]}, ladder=())
    lengths = {"base": (20.0, 22.0, 20.0), "short": (10.0, 12.0, 11.0), "equal": (20.0, 22.0, 20.0)}
    cells = {
        (label, seed): replace(cell, avg_tokens=lengths[label][seed]) for (label, seed), cell in table.cells.items()
    }
    short, equal = (analysis := analyze(replace(table, cells=cells))).baseline
    by_hand = [0.5, 10 / 22 + 3 * 0.1, 0.45]
    assert (short.lengths_differ, equal.lengths_differ) == (True, False)
    assert short.aes.value == pytest.approx(np.mean(by_hand))
    assert (short.aes.low, short.aes.high) == pytest.approx(reference.t_interval(by_hand))
    described = tables(analysis)["described"]
    assert described.columns[-1] == "AES"
    assert [row[-1] for row in described.rows] == ["+0.568 [+0.162, +0.974]", "-"]
    assert "AES" not in tables(analyze(table))["described"].columns


def test_failed_and_missing_runs_leave_their_seed_out_of_the_pairs_only(results):
    found = {(one.condition, one.against): one for one in (*analyze(results).ladder, *analyze(results).baseline)}
    assert found["maxrl", "grpo"].left_out == (3,)
    assert found["maxrl+gtpo", "maxrl"].left_out == (3,)
    assert found["maxrl+gtpo", "grpo"].left_out == ()
    assert found["maxrl+gtpo+sepa", "grpo"].left_out == (9,)
    assert "9 seeds (seed 3 without a pair)" in sentence(found["maxrl", "grpo"])
    assert "no result: maxrl seed 3 failed: the loss was not finite in 5 steps (exit 4)" in text(analyze(results))


def test_equal_tables_give_equal_numbers_whatever_the_order_of_their_cells(results):
    turned = replace(results, cells=dict(reversed(results.cells.items())))
    assert as_json(analyze(turned)) == as_json(analyze(results))


def test_runs_that_never_reach_the_threshold_count_as_later_than_all():
    table = simulated({"a": [0.2, 0.3, 0.4], "b": [0.1, 0.1, 0.4], "c": [0.1, 0.4]}, threshold=0.25)
    found = {label: summarize(table, label) for label in table.conditions}
    assert [found[label].reached for label in "abc"] == [2, 1, 1]
    assert [found[label].to_threshold["steps"] for label in "abc"] == [10.0, math.inf, math.inf]
    none = summarize(replace(table, threshold=None), "a")
    assert none.reached is None
    assert none.to_threshold == {}


def test_the_verdict_says_what_would_tell():
    rng = np.random.default_rng(1)
    share = rng.normal(0.5, 0.03, 8)
    noisy = {label: list(share + rng.normal(0, 0.02, 8)) for label in ("grpo", "maxrl", "maxrl+gtpo")}
    first, _ = analyze(simulated(noisy)).primary
    assert not first.significant
    assert first.needed > 8
    assert conclusion(first) == f"inconclusive; about {first.needed:,} seeds needed"
    few = analyze(simulated({"a": [0.1, 0.2, 0.3], "b": [0.3, 0.39, 0.5]})).primary[0]
    assert conclusion(few) == (
        "higher in every seed, and its 95% CI excludes 0; "
        "not significant with so few seeds for 1 comparison, at least 6 needed"
    )
    same = analyze(simulated({"a": [0.1] * 8, "b": [0.1] * 8})).primary[0]
    assert (same.p, same.needed) == (1.0, None)
    assert conclusion(same) == "inconclusive; more seeds would not help, the difference is 0"
    equal = Estimate(0.0, 0.0, 0.0)
    assert conclusion(replace(same, avg_tokens=equal)) == "no difference; the runs of both conditions are identical"
    assert conclusion(replace(same, avg_tokens=equal, area=Estimate(0.0, -0.1, 0.1))).startswith("inconclusive")
    two = analyze(simulated({"a": [0.1, 0.2], "b": [0.3, 0.5]})).primary[0]
    assert conclusion(two) == "inconclusive; 2 seeds cannot be significant, at least 6 needed"
    wide = analyze(simulated({"a": [0.1, 0.2, 0.3], "b": [0.3, 0.2, 0.9]})).primary[0]
    assert conclusion(wide).startswith("inconclusive; 3 seeds cannot be significant, at least 6 needed, about ")


def test_a_family_too_large_for_its_seeds_hides_no_difference():
    table = {"a": [0.1, 0.12] * 4} | {f"b{k}": [0.38, 0.41] * 4 for k in range(9)}
    found = analyze(simulated(table, ladder=()))
    assert {conclusion(one) for one in found.primary} == {
        "higher in every seed, and its 95% CI excludes 0; "
        "not significant with so few seeds for 9 comparisons, at least 9 needed"
    }
    assert headline(found).endswith(
        "0 of 9 conditions differ significantly from the baseline. "
        "9 more: the 95% CI excludes 0, but there are too few seeds for significance."
    )


@pytest.mark.slow
def test_a_declared_comparison_is_tested_alone():
    rng = np.random.default_rng(0)
    values = {"a": [0.1] * 6} | {f"b{k}": list(rng.normal(0.2, 0.01, 6)) for k in range(9)}
    found = analyze(simulated(values, ladder=(), primary="b4"))
    assert [(one.condition, one.size, one.holm == one.p, one.significant) for one in found.declared] == [
        ("b4", 1, True, True)
    ]
    assert [one.condition for one in found.baseline] == ["b0", "b1", "b2", "b3", "b5", "b6", "b7", "b8"]
    assert {(one.size, one.significant) for one in found.baseline} == {(8, False)}
    assert sentence(found.primary[0]).endswith("p = .031 (tested alone, as declared), 6 seeds: better.")
    said = "Holm's correction covers all comparisons, except the declared one, which is a separate test at 5%."
    assert f"{said} The family-wise error rate is at most 5%. " in note(found)
    assert headline(found).startswith("All 60 runs finished. 1 of 9 conditions differs significantly")
    with_ladder = analyze(simulated(values, ladder=(("b1", "b0"), ("b4", "a")), primary="b4"))
    assert [(one.condition, one.against) for one in with_ladder.primary] == [("b4", "a"), ("b1", "b0")]
    assert "b4" not in [one.condition for one in with_ladder.secondary]
    assert "The family-wise error rate is at most 5% in each family. " in note(with_ladder)
    assert [one["family"] for one in as_json(found)["comparisons"]] == ["primary"] + ["baseline"] * 8
    forests = _forests(found, [[]] * len(found.every))["forests"]
    assert [(title, len(rows)) for title, rows in forests] == [
        ("Declared comparison", 1),
        ("Each condition against the baseline", 8),
    ]


def test_sentences_name_the_ingredient():
    table = simulated({"grpo": [0.1] * 8, "maxrl": [0.2] * 8, "maxrl+gtpo": [0.25] * 8, "maxrl+gtpo_sepa": [0.2] * 8})
    found = analyze(table)
    assert [sentence(one) for one in found.primary] == [
        "maxrl against grpo: +0.100 accuracy, 95% CI [+0.100, +0.100], p = .0078 (Holm .023), 8 seeds: better.",
        "gtpo on top of maxrl: +0.050 accuracy, 95% CI [+0.050, +0.050], p = .0078 (Holm .023), 8 seeds: better.",
        "sepa on top of maxrl+gtpo: -0.050 accuracy, 95% CI [-0.050, -0.050], p = .0078 (Holm .023), 8 seeds: worse.",
    ]
    assert [sentence(one).split(":")[0] for one in found.secondary] == [
        "maxrl+gtpo against grpo",
        "maxrl+gtpo_sepa against grpo",
    ]
    assert headline(found) == "All 32 runs finished. 3 of 3 changes made a significant difference."


def test_the_level_is_the_campaigns():
    values = {"a": [0.1, 0.2, 0.3, 0.2, 0.1], "b": [0.2, 0.3, 0.41, 0.3, 0.2]}
    assert not analyze(simulated(values)).primary[0].significant
    assert analyze(simulated(values, alpha=0.1)).primary[0].significant


def test_without_a_ladder_the_baseline_is_the_question():
    found = analyze(simulated({"a": [0.1] * 8, "b": [0.2] * 8}, ladder=()))
    assert found.ladder == ()
    assert found.primary == found.baseline
    assert found.secondary == ()
    assert headline(found) == "All 16 runs finished. 1 of 1 conditions differs significantly from the baseline."


def test_nothing_to_compare():
    one = analyze(simulated({"a": [0.1, 0.2]}))
    assert headline(one) == "All 2 runs finished. There is one condition, so there is nothing to compare."
    none = analyze(simulated({"a": [None, None], "b": [0.2, 0.3]}))
    assert [sentence(one) for one in none.primary] == ["b against a: inconclusive; no seed has a result in both."]
    assert as_json(none)["comparisons"][0]["verdict"] == "inconclusive; no seed has a result in both"
    assert headline(none).startswith("2 of 4 runs finished. 0 of 1 conditions")
    assert math.isnan(none.summaries[0].mean.value)
    assert as_json(none)["conditions"][0]["mean"] == {"value": None, "low": None, "high": None}


def test_simulated_tables_without_a_difference_give_false_verdicts_in_at_most_5_percent():
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):  # 4,000 tables in test_statistics.py, which takes the same way without the tables
        share = rng.normal(0.5, 0.03, 8)
        table = {label: list(share + rng.normal(0, 0.02, 8)) for label in "abc"}
        wrong += any(one.significant for one in compare(simulated(table), [("b", "a"), ("c", "b")], "ladder"))
    assert wrong / 200 <= 0.05


def on_starts(results, starts):
    cells = {place: replace(cell, start=cell.seed % starts) for place, cell in results.cells.items()}
    return replace(results, cells=cells)


def test_runs_of_one_warm_start_count_as_one():
    values = {"a": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "b": [0.2, 0.5, 0.4, 0.6, 0.5, 0.9]}
    (one,) = analyze(on_starts(simulated(values), 3)).primary
    assert (len(one.seeds), one.starts, one.count) == (6, 3, 3)
    means = [np.mean([0.1, 0.2]), np.mean([0.3, 0.0]), np.mean([0.1, 0.3])]
    expected = mean_estimate([*map(float, means)])
    for end in ("value", "low", "high"):
        assert getattr(one.difference, end) == pytest.approx(getattr(expected, end))
    assert one.p == 2 / 2**3
    assert conclusion(one).endswith("so few warm starts for 1 comparison, at least 6 needed")
    assert "6 seeds on 3 warm starts" in sentence(one)
    (own,) = analyze(on_starts(simulated(values), 6)).primary
    (shared,) = analyze(simulated(values)).primary
    assert replace(own, starts=1) == shared


def test_intervals_cover_warm_starts_and_seeds():
    """Where warm starts differ in what a method gains, intervals over seeds of one start miss the mean over starts."""
    rng, covered = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):
        gain = rng.normal(0.05, 0.03, 8)  # of each start
        for index, own in enumerate((gain, np.full(8, gain[0]))):
            low, high = statistics.mean_interval(own + rng.normal(0, 0.01, 8))
            covered[index] += low <= 0.05 <= high
    assert 0.93 <= covered[0] / 1000 <= 0.97
    assert covered[1] / 1000 < 0.5
