"""A sequential design: its bounds, the words of what stopped, and the runs that a look needs."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtri

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict import run_reader
from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.looks import expected_seeds, look_state
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.sentences import as_json, note, sentence, short, text
from retrain.campaign.verdict.statistics import SequentialFamily, max_t, nominal_levels, spending
from retrain.campaign.verdict.verdict_page import exported, paper
from tests.campaign.tables import write_campaign

close = pytest.approx
SIZES = (8, 12, 16)


def table(effects, seeds=16, done=16, sizes=SIZES, sd=0.01, order=None, **more) -> Results:
    """Runs of conditions with known differences from the first; those of the later seeds are missing."""
    order = order or list(range(seeds))
    cells = {}
    for position, seed in enumerate(order):
        shared = random.Random(seed).gauss(0.5, 0.03)
        for label, effect in effects.items():
            value = shared + effect + random.Random(f"{label} {seed}").gauss(0, sd)
            ended = position < done
            curve = ((0, 0.1), (10, value)) if ended else ()
            status = "done" if ended else "missing"
            cells[label, seed] = Cell(label, seed, None, status, curve=curve, ended=ended)
    looks = tuple(tuple(order[:size]) for size in sizes)
    labels = tuple(effects)
    return Results("t", labels, labels[0], tuple(sorted(order)), cells, looks=looks, **more)


EFFECTS = {"grpo": 0.0, "strong": 0.05, "none": 0.0}


def test_spending_and_levels_are_those_of_a_pocock_type():
    assert spending(SIZES) == close((0.0310, 0.0414, 0.05), abs=1e-4)
    assert nominal_levels((16,)) == close((0.05,), rel=0.01)
    first, *later = nominal_levels(SIZES)
    assert first == close(0.031, abs=0.001)
    rng = np.random.default_rng(0)
    walks = np.cumsum(rng.normal(size=(20_000, 16)), axis=1)

    crossed = [
        np.abs(walks[:, size - 1]) > -ndtri(level / 2) * size**0.5
        for size, level in zip(SIZES, (first, *later), strict=True)
    ]
    shares = [np.mean(np.any(crossed[: number + 1], axis=0)) for number in range(3)]
    assert shares == close(spending(SIZES), abs=0.004), "all intervals contain the mean with probability .95"


def test_one_look_is_the_step_down_max_t_test():
    rng = np.random.default_rng(3)
    for _ in range(5):
        paired = rng.normal(0.6, 1, size=(4, 8))
        family = SequentialFamily(paired, [8], [0.0] * 4, range(8))
        expected = max_t(paired)
        found = family.test(0, range(4), {})
        for index in range(4):
            assert (found[index] <= 0.05) == (expected[index] <= 0.05)
            assert found[index] == close(expected[index]) or expected[index] > 0.05


def test_the_order_of_the_comparisons_changes_no_p_value():
    paired = np.random.default_rng(2).normal([[1.5], [0.5], [1.0], [0.2]], 1, size=(4, 8))
    family = SequentialFamily(paired, [8], [0.0] * 4, range(8))
    p = family.test(0, [0, 1, 2, 3], {})
    assert p == family.test(0, [3, 1, 0, 2], {})
    assert len(set(p.values())) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind"), [(1, "normal"), (4, "normal"), (4, "exponential")])
def test_a_design_without_an_effect_claims_at_most_its_level(size, kind):
    rng = np.random.default_rng([size, len(kind)])
    claims = 0
    for _ in range(400):
        noise = rng.normal(size=(size + 1, 16)) if kind == "normal" else rng.exponential(size=(size + 1, 16))
        family = SequentialFamily(noise[1:] - noise[0], SIZES, [0.0] * size, range(16), draws=2000)
        spent = spending(SIZES)
        claims += any(min(family.test(look, range(size), {}).values()) <= spent[look] for look in range(3))
    assert claims / 400 <= 0.085


def test_a_condition_stops_when_its_comparisons_have_ended():
    found = analyze([table(EFFECTS)])
    strong, none = found.comparisons
    assert (short(strong), strong.look.number, strong.look.ended, len(strong.seeds)) == ("better", 1, True, 8)
    assert (short(none), none.look.number, none.look.ended, len(none.seeds)) == ("inconclusive", 3, True, 16)
    assert found.passed == 3
    assert found.stopped == {("", "strong"): 8, ("", "none"): 16, ("", "grpo"): 16}
    assert len(found.first.of("strong")) == 8, "runs beyond its stop are not used"
    assert "stopped at 8 of 16 seeds by the declared looks" in sentence(strong)
    assert "96.9% CI [" in sentence(strong)
    assert strong.difference.high - strong.difference.value > strong.mean.interval().high - strong.difference.value
    for output in (text(found), paper(found), json.dumps(as_json(found))):
        assert "strong against grpo" in output
        assert "CIs are t intervals at the level of the look: 96.9% at 8 seeds" in note(found)
    assert exported(found)["differences"].svg.count('class="axis"') > 6, "three ticks in each row"


def test_a_look_waits_for_all_of_its_runs():
    early = analyze([table(EFFECTS, done=7)])
    assert (early.passed, early.stopped, {short(one) for one in early.comparisons}) == (0, {}, {"continues"})
    assert "look 1 of 3 waits for 8 of 16 seeds" in sentence(early.comparisons[0])
    between = analyze([table(EFFECTS, done=10)])
    assert (between.passed, between.stopped) == (1, {("", "strong"): 8})
    assert [short(one) for one in between.comparisons] == ["better", "continues"]
    whole = table(EFFECTS, done=12)
    cells = {place: cell for place, cell in whole.cells.items() if place[0] != "strong" or place[1] < 8}
    assert analyze([replace(whole, cells=cells)]).passed == 2, "a stopped condition needs no further runs"
    lost = {place: replace(cell, status="failed") if place == ("none", 3) else cell for place, cell in cells.items()}
    assert analyze([replace(whole, cells=lost)]).passed == 2, "a failed run has ended"


def test_the_result_is_that_of_the_first_seeds_in_the_order_of_the_plan():
    order = [5, 3, 8, 11, 0, 1, 2, 4, *range(6, 8), 9, 10, 12, 13, 14, 15]
    found = analyze([table(EFFECTS, done=8, order=order)])
    assert found.stopped == {("", "strong"): 8}
    assert found.comparisons[0].seeds == (0, 1, 2, 3, 4, 5, 8, 11)


def test_seeds_with_warm_starts_of_their_own_are_those_of_the_look():
    """The index of a warm start is not a seed: the first look at seeds 20 to 27 is at their starts, 0 to 7."""
    order = [*range(35, 27, -1), *range(20, 28)]
    whole = table(EFFECTS, order=order)
    own = {place: replace(cell, start=order.index(cell.seed)) for place, cell in whole.cells.items()}
    for shared, separate in zip(
        *(analyze([replace(whole, cells=c)]).comparisons for c in (whole.cells, own)), strict=True
    ):
        assert separate == replace(shared, starts=len(shared.seeds))


def test_a_comparison_that_waits_does_not_say_how_a_failed_run_would_decide():
    strong = table(EFFECTS)
    lost = {
        place: replace(cell, status="failed") if place == ("strong", 2) else cell
        for place, cell in strong.cells.items()
    }
    waiting = {
        place: replace(cell, status="missing", ended=False) if place[1] == 7 else cell for place, cell in lost.items()
    }
    assert not any(one.failures for one in analyze([replace(strong, cells=waiting)]).comparisons)


def test_a_look_with_few_pairs_names_the_pairs_of_its_test():
    whole = table({"grpo": 0.0, "strong": 0.05})
    few = {place: cell if place[1] < 4 else replace(cell, status="failed") for place, cell in whole.cells.items()}
    assert "4 seeds, a verdict needs 6" in sentence(analyze([replace(whole, cells=few)]).comparisons[0])


def test_a_margin_ends_a_comparison_as_equal():
    found = analyze([table({"grpo": 0.0, "same": 0.001}, outcome=Outcome(margin=0.03))])
    (one,) = found.comparisons
    assert (short(one), one.look.number) == ("equal within 0.03", 1)
    assert max(abs(one.difference.low), abs(one.difference.high)) < 0.03


def test_what_ended_as_equal_still_counts_in_the_family_but_its_later_runs_do_not():
    paired = np.random.default_rng(5).normal(0.4, 1, size=(4, 16))
    later = paired.copy()
    later[0, 8:] = 100.0
    with_equal, with_later_runs, without = (
        SequentialFamily(data, SIZES, [0.0] * 4, range(16)).test(1, [1, 2, 3], equal)
        for data, equal in ((paired, {0: 0}), (later, {0: 0}), (paired, {}))
    )
    assert with_equal == with_later_runs
    assert all(with_equal[index] >= without[index] for index in without)
    assert with_equal != without


def test_a_withheld_verdict_stops_nothing():
    whole = table(EFFECTS)
    cells = {
        place: replace(cell, no_update="no step changed the weights") if place[0] == "strong" else cell
        for place, cell in whole.cells.items()
    }
    found = analyze([replace(whole, cells=cells)])
    assert ("", "strong") not in {key for key, seeds in found.stopped.items() if seeds < 16}
    assert short(found.comparisons[0]) == "no verdict"


def test_the_state_of_a_campaign_is_that_of_its_stored_runs(tmp_path, monkeypatch):
    effects = {"grpo": 0.0, "maxrl": 0.15}
    options = {"conditions": ("grpo", "maxrl"), "effects": effects, "failed": (), "steps": 40}
    missing = [("grpo", seed) for seed in range(10, 16)] + [("maxrl", seed) for seed in range(8, 16)]
    directory = write_campaign(tmp_path / "c", seeds=range(16), missing=missing, **options)
    plain = run_reader.read_plan

    class WithLooks:
        """The plan with looks."""

        def __init__(self, plan):
            self._plan, self.look_sizes = plan, SIZES

        def __getattr__(self, name):
            return getattr(self._plan, name)

    monkeypatch.setattr(run_reader, "read_plan", lambda path: WithLooks(plain(path)))
    monkeypatch.setattr(run_reader, "declaration", lambda plan: None)
    state = look_state(directory, read_plan(directory))
    assert state.passed == 3, "after all conditions have ended no further look waits"
    assert state.stopped == {"maxrl": (8, "better"), "grpo": (8, "every comparison has ended")}


def test_expected_seeds_fall_with_the_effect():
    none, clear = (expected_seeds(SIZES, 1, effect=effect, tables=100) for effect in (0.0, 1.5))
    assert none[0] > 15
    assert clear[0] == clear[1] < 9
    assert expected_seeds(SIZES, 1, effect=0.0, margin=1.5, tables=100)[0] < 10
