"""Comparisons recover the differences that the tables were made with, and their verdicts say what the data say."""

import math
from dataclasses import replace
from statistics import fmean
from typing import get_args

import numpy as np
import pytest

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.analysis import Analysis, analyze, average, claims, compare, mean_estimate
from retrain.campaign.verdict.judging import Contrast, Judged
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.sentences import as_json, conclusion, headline, note, sentence, short, text, texts
from retrain.campaign.verdict.statistics import mean_of, welch
from retrain.campaign.verdict.verdict_kinds import KINDS, VerdictKind
from retrain.campaign.verdict.verdict_page import exported, paper, render, spent
from tests.campaign.tables import EFFECTS
from tests.reference import statistics as reference


def simulated(results: dict[str, list[float | None]], **more) -> Results:
    """A table of runs of one evaluation; None: the run failed."""
    cells = {
        (label, seed): Cell(label, seed, None, "failed" if value is None else "done", curve=((0, 0.1), (10, value)))
        for label, values in results.items()
        for seed, value in enumerate(values)
    }
    seeds = tuple(range(max(map(len, results.values()))))
    labels = tuple(results)
    ladder = tuple(zip(labels[1:], labels, strict=False))
    return Results("t", labels, labels[0], seeds, cells, **{"ladder": ladder} | more)


def noisy(effect=0.0, seeds=8, sd=0.01, base=0.5, seed=3):
    """Results of two conditions that share what their seeds give."""
    rng = np.random.default_rng(seed)
    share = rng.normal(base, 0.03, seeds)
    return {"a": list(share + rng.normal(0, sd, seeds)), "b": list(share + effect + rng.normal(0, sd, seeds))}


def only(table: Results):
    (one,) = analyze([table]).comparisons
    return one


def test_the_families_are_the_ladder_and_the_baseline(results):
    found, labels = analyze([results]).comparisons, list(EFFECTS)
    of = {
        name: [(one.condition, one.against) for one in found if one.family == name] for name in ("ladder", "baseline")
    }
    assert of["ladder"] == list(zip(labels[1:], labels, strict=False))
    assert of["baseline"] == [(label, "grpo") for label in labels[1:]]
    assert all(one.size == 4 for one in found)


def test_known_differences_are_found_and_estimated(results):
    for one in analyze([results]).comparisons:
        true = EFFECTS[one.condition] - EFFECTS[one.against]
        assert one.difference.low - 0.01 < true < one.difference.high + 0.01
        assert (one.kind != "open") == (abs(true) > 0.02)
        assert one.kind in ("open", "better" if true > 0 else "worse")


def test_a_comparison_equals_the_reference(results):
    found = [one for one in analyze([results]).comparisons if one.family == "baseline"]
    seeds = [seed for seed in range(10) if seed not in (3, 9)]  # complete in every condition
    complete = replace(results, cells={key: cell for key, cell in results.cells.items() if key[1] in seeds})
    found = compare([Contrast(complete, one.condition, one.against) for one in found], "baseline")
    pairs = [
        [results.done(one.condition)[seed].result - results.done(one.against)[seed].result for seed in seeds]
        for one in found
    ]
    corrected = reference.max_t(pairs, floor=0.5 / 512)
    for one, differences, p in zip(found, pairs, corrected, strict=True):
        assert one.mean.value == pytest.approx(np.mean(differences), abs=1e-12)
        assert one.difference[1:] == pytest.approx(reference.t_interval(differences), abs=1e-9)
        assert (one.judged.p, one.judged.corrected) == pytest.approx((reference.sign_flip(differences), p), abs=1e-12)
        assert one.effect == pytest.approx(reference.hedges(differences), rel=1e-9)


def test_the_aes_is_that_of_each_pair_of_runs():
    table = simulated({"base": [0.5, 0.5, 0.4], "short": [0.5, 0.55, 0.4], "equal": [0.6, 0.5, 0.5]}, ladder=())
    lengths = {"base": (20.0, 22.0, 20.0), "short": (10.0, 12.0, 11.0), "equal": (20.0, 22.0, 20.0)}
    cells = {
        (label, seed): replace(cell, avg_tokens=lengths[label][seed]) for (label, seed), cell in table.cells.items()
    }
    short_one, _ = analyze([replace(table, cells=cells)]).comparisons
    by_hand = [0.5, 10 / 22 + 3 * 0.1, 0.45]
    assert short_one.aes.value == pytest.approx(np.mean(by_hand))
    assert short_one.aes[1:] == pytest.approx(reference.t_interval(by_hand))


def test_failed_and_missing_runs_leave_their_seed_out_of_the_pairs_only(results):
    found = {(one.condition, one.against): one for one in analyze([results]).comparisons}
    assert found["maxrl", "grpo"].left_out == (3,)
    assert found["maxrl+gtpo", "maxrl"].left_out == (3,)
    assert found["maxrl+gtpo", "grpo"].left_out == ()
    assert found["maxrl+gtpo+sepa", "grpo"].left_out == (9,)
    assert "9 seeds (seed 3 without a pair)" in sentence(found["maxrl", "grpo"])
    assert "no result: maxrl seed 3 failed: the loss was not finite in 5 steps (exit 4)" in text(analyze([results]))


# --- Three to five seeds: the t test speaks, and says what it assumes.


def test_a_large_effect_over_four_seeds_has_a_verdict_by_the_t_test():
    table = noisy(-0.7, seeds=4, base=0.85) | {"c": noisy(0.014, seeds=4, sd=0.02, base=0.85)["b"]}
    worse, other = analyze([simulated(table, ladder=())]).comparisons
    assert (short(worse), short(other)) == ("worse (t test)", "inconclusive")
    expected = reference.holm([one.mean.p for one in (worse, other)])
    assert [worse.judged.corrected, other.judged.corrected] == pytest.approx(expected)
    assert conclusion(worse) == (
        "worse (t test, corrected p < .001; assumes roughly normal differences; with 6 seeds the exact test can decide)"
    )
    found = analyze([simulated(table, ladder=())])
    assert headline(found) == "All 12 runs finished. 2 of 2 conditions measured: 1 worse (t test), 1 inconclusive."


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_verdict(seeds):
    one = only(simulated(noisy(0.3, seeds=seeds)))
    assert (one.kind, one.judged.test, short(one)) == ("open", "", "no verdict")
    assert conclusion(one) == f"no verdict; {seeds} seed{'s' * (seeds > 1)}, a verdict needs 3"


@pytest.mark.parametrize(("pairs", "word"), [(2, "no verdict"), (4, "inconclusive"), (7, "inconclusive")])
def test_a_method_with_few_runs_does_not_silence_the_others(pairs, word):
    table = noisy(0.06, seeds=12) | {"c": [*noisy(0.0, seeds=12, seed=9)["b"][:pairs], *[None] * (12 - pairs)]}
    better, few = analyze([simulated(table, ladder=())]).comparisons
    assert (short(better), short(few)) == ("better", word)
    assert better.judged.corrected < 0.002
    both = "or twice that in a family with both tests"
    assert (both in note(analyze([simulated(table, ladder=())]))) is (pairs == 4)


def test_a_failed_run_of_six_does_not_silence_the_others():
    table = noisy(0.1, seeds=6, sd=0.003) | {"c": [*noisy(0.1, seeds=5, sd=0.003)["b"], None]}
    whole, failed = analyze([simulated(table, ladder=())]).comparisons
    assert (short(whole), whole.judged.corrected) == ("better", 2 / 2**6)
    assert failed.judged.test == "t test"


@pytest.mark.parametrize("size", [1, 9])
def test_six_seeds_suffice_for_any_family(size):
    rng = np.random.default_rng(2)
    others = {f"c{index}": list(rng.normal(0.5, 0.05, 6)) for index in range(size - 1)}
    table = noisy(0.2, seeds=6, sd=0.002) | others
    first, *_ = analyze([simulated(table, ladder=())]).comparisons
    assert (first.size, first.judged.corrected, short(first)) == (size, 2 / 2**6, "better")


def test_the_level_is_the_campaigns():
    table = {"a": [0.1, 0.2, 0.3, 0.2, 0.1], "b": [0.2, 0.3, 0.41, 0.3, 0.2]}
    assert only(simulated(table)).judged.test == "t test"
    exact = only(simulated(table, alpha=0.1))
    assert (exact.judged.test, exact.judged.p, exact.kind) == ("exact", 2 / 2**5, "better")


# --- A margin makes equality a result.


def test_equality_within_a_margin_is_a_verdict():
    outcome = Outcome(margin=0.02)
    table = noisy(0.002, sd=0.005)
    equal = only(simulated(table, outcome=outcome))
    paired = [b - a for a, b in zip(table["a"], table["b"], strict=True)]
    assert equal.judged.equality == pytest.approx(
        max(mean_of(paired).p_not_above(-0.02), mean_of(paired).p_not_below(0.02))
    )
    assert short(equal) == "equal within 0.02"
    assert "two one-sided t tests, p < .001" in conclusion(equal)
    not_worse = only(simulated(noisy(0.015, sd=0.018), outcome=outcome))
    assert short(not_worse) == "not worse by more than 0.02"
    unsure = only(simulated(noisy(0.0, sd=0.05), outcome=outcome))
    assert short(unsure) == "inconclusive"
    assert f"about {unsure.needed} seeds would show equality within 0.02" in conclusion(unsure)
    small = only(simulated(noisy(0.01, sd=0.002), outcome=outcome))
    assert conclusion(small).startswith("better (p = .0078); by less than the margin of 0.02")
    assert short(only(simulated(noisy(0.002, sd=0.005)))) == "inconclusive", "without a margin"


def test_a_smaller_value_is_better_if_the_goal_says_so():
    loss = Outcome(metric="eval_loss", goal="min", margin=0.05)
    worse = only(simulated(noisy(0.511, base=2.0), outcome=loss))
    assert sentence(worse).startswith("b against a: +0.5")
    assert " eval_loss (less is better), 95% CI" in sentence(worse)
    assert conclusion(worse) == "worse (p = .0078)"
    assert short(only(simulated(noisy(-0.511, base=2.0), outcome=loss))) == "better"
    shown = only(simulated(noisy(-0.03, base=2.0, sd=0.04), outcome=loss))
    assert short(shown) == "not worse by more than 0.05"


def test_many_comparisons_without_a_verdict_share_a_line():
    few, many = (simulated({str(label): [0.01 * label + 0.11, 0.2] for label in range(count)}) for count in (3, 8))
    assert text(analyze([few])).count("a verdict needs 3") == 3
    assert text(analyze([many])).count("a verdict needs 3") == 1


def test_a_claim_over_several_outcomes_holds_if_each_holds():
    accuracy, tokens = Outcome(margin=0.02), Outcome(metric="tokens", goal="min")
    equal, worse = noisy(0.002, sd=0.005), noisy(-0.3, sd=0.005)
    shorter, longer = noisy(-5, base=30), noisy(5, base=30)
    for one, other, holds in ((equal, shorter, True), (worse, shorter, False), (equal, longer, False)):
        found = analyze([simulated(one, outcome=accuracy), simulated(other, outcome=tokens)])
        assert claims(found) == {"b": holds}
        assert f"claim, every outcome together: {'holds' if holds else 'not shown'} for b" in text(found)
    assert "accuracy: 1 of 1 condition measured: 1 equal within 0.02. tokens: 1 of 1 condition" in headline(
        analyze([simulated(equal, outcome=accuracy), simulated(shorter, outcome=tokens)])
    )
    assert claims(analyze([simulated(equal, outcome=accuracy)])) == {}


# --- What an open comparison says.


def test_an_open_comparison_says_what_its_seeds_detect():
    one = only(simulated(noisy()))
    assert short(one) == "inconclusive"
    assert one.detectable == pytest.approx(one.deviation * 1.16, rel=0.03)
    assert conclusion(one).endswith(f"8 seeds detect a difference of {one.detectable:.3f} with 80% power")
    assert "more seeds" not in conclusion(one)
    equal = only(simulated({"a": [0.1, 0.2] * 4, "b": [0.2, 0.1] * 4}))
    assert (equal.mean.value, equal.judged.corrected) == (0.0, 1.0)
    assert "needed" not in conclusion(equal)
    assert "would not help" not in conclusion(equal)


def test_identical_runs_are_said_to_be_identical():
    one = only(simulated({"a": [0.1, 0.2, 0.3], "b": [0.1, 0.2, 0.3]}))
    assert short(one) == "inconclusive", "the lengths of the answers are not known"
    table = simulated({"a": [0.1, 0.2, 0.3], "b": [0.1, 0.2, 0.3]})
    known = replace(table, cells={key: replace(cell, avg_tokens=9.0) for key, cell in table.cells.items()})
    assert short(only(known)) == "identical"


# --- An interval that seems to contradict the verdict is explained.


def test_a_correction_that_changes_the_answer_is_named():
    rng = np.random.default_rng(5)
    others = {f"c{index}": list(rng.normal(0.5, 0.05, 8)) for index in range(9)}
    first, *_ = analyze([simulated(noisy(0.012, sd=0.009, seed=3) | others, ladder=())]).comparisons
    assert (first.kind, first.difference.low > 0, first.judged.p <= 0.05) == ("open", True, True)
    assert "0 is outside of the interval, but not after correction for 10 comparisons" in conclusion(first)


def test_a_test_that_disagrees_with_the_interval_is_named():
    outside = only(simulated({"a": [0.5] * 6, "b": [0.53, 0.53, 0.53, 0.53, 0.53, 0.499]}))
    assert (outside.kind, outside.difference.low > 0) == ("open", True)
    assert "0 is outside of the interval, and the exact test, p = .062, decides" in conclusion(outside)
    inside = only(simulated({"a": [0.5] * 6, "b": [0.501, 0.501, 0.501, 0.501, 0.501, 0.7]}))
    assert (inside.kind, inside.difference.low < 0) == ("better", True)
    found = text(analyze([simulated({"a": [0.5] * 6, "b": [0.501, 0.501, 0.501, 0.501, 0.501, 0.7]})]))
    assert "0 is inside of the interval, and the exact test decides" in found


@pytest.mark.parametrize("goal", ["max", "min"])
def test_equal_needs_the_printed_interval_within_the_margin(goal):
    """Two one-sided tests at .05 reach further than the 95% interval, which would contradict the verdict."""
    rng = np.random.default_rng(0)
    kinds, contradictions = set(), 0
    for _ in range(200):
        difference = rng.normal(0, 0.035, 5)
        table = {"a": [0.5] * 5, "b": [*(0.5 + difference)]}
        one = only(simulated(table, outcome=Outcome(margin=0.04, goal=goal)))
        kinds.add(one.kind)
        low, high = one.difference[1:]
        beyond = low <= -0.04 if goal == "max" else high >= 0.04
        contradictions += (one.kind == "equal" and (low <= -0.04 or high >= 0.04)) or (
            one.kind == "not worse" and beyond
        )
    assert {"equal", "not worse", "open"} <= kinds
    assert not contradictions


# --- Warnings.


def test_the_verdict_is_withheld_if_no_seed_changes_anything():
    one = only(simulated({"a": [0.15] * 8, "b": [0.2] * 8}))
    assert (one.judged.corrected, one.kind, short(one)) == (2 / 2**8, "open", "no verdict")
    assert conclusion(one) == "no verdict: every seed of b and of a has the same result: the seed changes nothing"
    assert texts(one)["corrected p"] == "-", "a p-value would be read as a verdict"
    stuck = only(simulated({"a": [0.5] * 8, "b": [0.5] * 8}, outcome=Outcome(margin=0.1)))
    assert short(stuck) == "no verdict", "two stuck metrics are not equal methods"
    twice = only(simulated({"a": [0.5] * 2, "b": [0.6] * 2}, paired=False))
    assert short(twice) == "no verdict"
    coarse = only(simulated({"a": [0.1, 0.2, 0.3], "b": [0.3, 0.4, 0.5]}))
    assert coarse.judged.corrected > 0.01, "equal differences of values with one decimal have half of it as their sd"
    constant = only(simulated({"a": noisy()["a"], "b": [0.7] * 8}))
    assert short(constant) == "better"
    assert conclusion(constant).endswith("; every seed of b has the same result: the seed changes nothing")
    assert short(only(simulated({"a": [0.0] * 8, "b": [1.0] * 8}))) == "better", "saturated, not constant"


def test_better_is_withheld_if_the_failed_runs_decide():
    table = noisy(0.05, seeds=12)
    table["b"] = [None if seed in (1, 4, 7, 9) else value for seed, value in enumerate(table["b"])]
    table["a"][0] = 0.1
    one = only(simulated(table))
    assert (one.judged.kind, one.kind) == ("better", "open")
    assert "with the 4 failed runs (4 of b) counted as the worst value seen, -0.0" in conclusion(one)
    assert conclusion(one).startswith("no verdict: the failed runs decide; ")
    turned = {"a": table["b"], "b": table["a"]}
    assert short(only(simulated(turned))) == "no verdict", "the condition is worse than the runs that survived"
    harmless = noisy(0.3, seeds=12)
    harmless["a"][2] = None
    one = only(simulated(harmless))
    assert short(one) == "better"
    assert "1 failed run (1 of a)" in conclusion(one)


# --- Declared comparisons, ladders, and tables without results.


class Declared:
    """A declaration made in time."""

    claim, primary, baseline, late, sentence = None, "b4", "a", False, "It was declared."

    def facts(self):
        return {}


def test_a_declared_comparison_is_tested_alone():
    rng = np.random.default_rng(0)
    values = {"a": list(rng.normal(0.1, 0.01, 6))} | {f"b{k}": list(rng.normal(0.2, 0.01, 6)) for k in range(9)}
    found = analyze([simulated(values, ladder=(), declared=Declared())])
    first, *others = found.comparisons
    assert (first.family, first.condition, first.size, first.judged.p) == ("primary", "b4", 1, first.judged.corrected)
    assert [one.condition for one in others] == ["b0", "b1", "b2", "b3", "b5", "b6", "b7", "b8"]
    assert {one.size for one in others} == {8}
    assert conclusion(first) == "better (tested alone, as declared; p = .031)"
    assert "there are 2 families (declared before the runs, tested alone, each condition" in note(found)
    assert "It was declared." in text(found)
    ladder = analyze([simulated(values, ladder=(("b1", "b0"), ("b4", "a")), declared=Declared())])
    assert [(one.condition, one.against) for one in ladder.comparisons[:2]] == [("b4", "a"), ("b1", "b0")]
    assert "b4" not in [one.condition for one in ladder.comparisons[1:]]


def test_sentences_name_the_ingredient():
    rng = np.random.default_rng(0)
    levels = {"grpo": 0.1, "maxrl": 0.2, "maxrl+gtpo": 0.25, "maxrl+gtpo_sepa": 0.2}
    found = analyze([simulated({one: list(level + rng.normal(0, 0.001, 8)) for one, level in levels.items()})])
    assert [sentence(one).split(":")[0] for one in found.shown] == [
        *("maxrl against grpo", "gtpo on top of maxrl", "sepa on top of maxrl+gtpo"),
        *("maxrl+gtpo against grpo", "maxrl+gtpo_sepa against grpo"),
    ]
    assert headline(found) == "All 32 runs finished. 3 of 3 changes measured: 2 better, 1 worse."


def test_nothing_to_compare():
    one = analyze([simulated({"a": [0.1, 0.2]})])
    assert headline(one) == "All 2 runs finished. There is one condition, so there is nothing to compare."
    none = analyze([simulated({"a": [None, None], "b": [0.2, 0.3]})])
    assert [sentence(one) for one in none.comparisons] == ["b against a: no seed has a result in both."]
    assert headline(none) == "2 of 4 runs finished. 0 of 1 condition measured: no seed has a result in both."
    assert as_json(none)["comparisons"][0]["difference"] == {"value": None, "low": None, "high": None}
    assert math.isnan(average(none.first, "a").value)


def test_steps_to_the_threshold_have_an_interval_if_all_runs_reach_it():
    table = simulated({"a": [0.2, 0.3, 0.4], "b": [0.3, 0.3, 0.4]}, threshold=0.25)
    some, every = (spent(table, label) for label in "ab")
    assert (some["reached"], every["reached"]) == ("2 of 3", "3 of 3")
    assert (some["steps until then"], every["steps until then"]) == ("-", "10 [10, 10]")
    assert spent(replace(table, threshold=None), "a")["reached"] == "-"


def test_equality_is_shown_at_the_level_of_the_campaign():
    table = simulated({"a": [0.5] * 8, "b": [0.503, 0.497, 0.511, 0.504, 0.513, 0.492, 0.507, 0.511]})
    strict, usual = (only(replace(table, alpha=alpha, outcome=Outcome(margin=0.012))) for alpha in (0.01, 0.05))
    assert 0.01 < strict.judged.equality == usual.judged.equality <= 0.05
    assert (short(strict), short(usual)) == ("not worse by more than 0.012", "equal within 0.012")


def test_equal_differences_of_integers_are_no_proof():
    whole, decimal = ({"a": [10.0, 11.0, 12.5], "b": [11.0, 12.0, 13.5]} for _ in range(2))
    whole = {label: [float(int(value)) for value in values] for label, values in whole.items()}
    reward = Outcome(metric="reward")
    assert short(only(simulated(whole, outcome=reward))) == "inconclusive", "known to .5, as three runs of .52 to .005"
    assert short(only(simulated(decimal, outcome=reward))) == "better (t test)"


def test_a_claim_holds_by_the_verdict_that_is_shown():
    """The pair of the ladder is corrected with one other, and the same pair of the hidden family with eight."""
    rng = np.random.default_rng(1)
    values = {"a": list(rng.normal(0.5, 0.01, 7))} | {f"c{i}": list(rng.normal(0.5, 0.01, 7)) for i in range(8)}
    values["b"] = [value + 0.01 + 0.008 * noise for value, noise in zip(values["a"], rng.normal(size=7), strict=True)]
    outcomes = (Outcome(), Outcome(metric="tokens", goal="max"))
    table = simulated(values, ladder=(("b", "a"), ("c0", "a")))
    found = analyze([replace(table, outcome=outcome) for outcome in outcomes])
    assert [one.kind for one in found.comparisons if one.condition == "b"] == ["better", "open"] * 2
    assert claims(found)["b"], "the family that is not shown does not decide"


# --- Warm starts.


def on_starts(results, starts):
    cells = {place: replace(cell, start=cell.seed % starts) for place, cell in results.cells.items()}
    return replace(results, cells=cells)


def test_runs_of_one_warm_start_count_as_one():
    values = {"a": [0.101, 0.2, 0.3, 0.4, 0.5, 0.6], "b": [0.201, 0.5, 0.4, 0.6, 0.5, 0.9]}  # written to three decimals
    one = only(on_starts(simulated(values), 3))
    assert (len(one.seeds), one.starts, one.count) == (6, 3, 3)
    means = [np.mean([0.1, 0.2]), np.mean([0.3, 0.0]), np.mean([0.1, 0.3])]
    assert one.difference == pytest.approx(mean_estimate([*map(float, means)]))
    assert one.judged.test == "t test", "three observations"
    assert "6 seeds on 3 warm starts" in sentence(one)
    own, shared = only(on_starts(simulated(values), 6)), only(simulated(values))
    assert replace(own, starts=1) == shared
    assert own.judged.test == "exact"


def test_a_lost_warm_start_leaves_one_observation_and_not_eight_seeds():
    values = noisy(0.09, seeds=16)
    table = on_starts(simulated(values), 2)
    missing = {place: replace(cell, status="missing") for place, cell in table.cells.items() if place[1] % 2}
    one = only(replace(table, cells={**table.cells, **{("b", seed): missing["b", seed] for seed in range(1, 16, 2)}}))
    assert (len(one.seeds), one.starts, one.count, short(one)) == (8, 1, 1, "no verdict")
    assert "8 seeds on 1 warm start (seeds 1, 3," in sentence(one)
    assert "1 warm start, a verdict needs 3" in sentence(one)


def test_unpaired_runs_of_one_warm_start_count_as_one():
    table = replace(on_starts(simulated(noisy(0.09, seeds=16)), 2), paired=False)
    one = only(table)
    means = [
        [fmean(cell.result or 0.0 for cell in table.of(label) if cell.start == start) for start in (0, 1)]
        for label in "ba"
    ]
    assert one.mean == pytest.approx(welch(*means))
    assert "16 against 16 runs on 2 warm starts, not paired" in sentence(one)


def test_intervals_cover_warm_starts_and_seeds():
    """Where warm starts differ in what a method gains, intervals over seeds of one start miss the mean over starts."""
    rng, covered = np.random.default_rng(0), np.zeros(2)
    for _ in range(1000):
        gain = rng.normal(0.05, 0.03, 8)  # of each start
        for index, own in enumerate((gain, np.full(8, gain[0]))):
            _, low, high = mean_estimate([*(own + rng.normal(0, 0.01, 8))])
            covered[index] += low <= 0.05 <= high
    assert 0.93 <= covered[0] / 1000 <= 0.97
    assert covered[1] / 1000 < 0.5


def test_every_kind_has_a_row():
    assert set(KINDS) == set(get_args(VerdictKind))


@pytest.mark.parametrize("kind", get_args(VerdictKind))
def test_every_output_shows_every_kind(kind, tmp_path):
    table = simulated(noisy(), ladder=())
    table = replace(table, cells={place: replace(cell, path=tmp_path) for place, cell in table.cells.items()})
    (one,) = analyze([table]).comparisons
    found = Analysis((table,), (replace(one, judged=Judged("exact", 0.04, 0.04, kind=kind)),))
    words = KINDS[kind].words.format(margin="0")
    assert f"{KINDS[kind].mark} {words}" in text(found)
    assert as_json(found)["comparisons"][0]["verdict"] == words
    assert words in render(found, [])
    assert words in paper(found)
    assert f'class="{KINDS[kind].css} mark"' in exported(found)["differences"].svg
    assert claims(found) == {}
