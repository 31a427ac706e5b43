"""The addition task: disjoint splits, arithmetic of the demonstrations, determinism."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.data.addition import Addition, Habits, demonstrate, pair_is_heldout

CAREFUL = Habits(p_quick=0, p_slip=0, p_check=0)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (57, 68, "let me think\n7+8=15\n5+6+1=12\nso 125"),
        (20, 35, "let me think\n0+5=5\n2+3=5\nso 55"),
        (999, 1, "let me think\n9+1=10\n9+0+1=10\n9+0+1=10\nso 1000"),
    ],
)
def test_careful_demonstration_worked_by_hand(a, b, text):
    assert demonstrate(a, b, random.Random(0), CAREFUL) == text


def test_checking_and_redoing_use_planning_phrases():
    checks = demonstrate(57, 68, random.Random(0), Habits(p_quick=0, p_slip=0, p_check=1))
    always = Habits(p_quick=0, p_slip=1, p_redo=1)
    assert any("let me check" in demonstrate(57, 68, random.Random(i), Habits(p_quick=0, p_slip=0)) for i in range(60))
    assert checks.endswith("so 125")
    for seed in range(20):
        text = demonstrate(57, 68, random.Random(seed), always)
        assert "wait let me redo" in text
        assert text.endswith("so 125")


def test_unnoticed_slips_make_wrong_answers():
    slips = Habits(p_quick=0, p_slip=1, p_redo=0)
    answers = {demonstrate(57, 68, random.Random(i), slips).rsplit(" ", 1)[1] for i in range(50)}
    assert len(answers) > 3
    assert all(answer.isdigit() for answer in answers)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9), start=st.integers(0, 10**9))
def test_training_never_meets_heldout(seed, start):
    task = Addition(seed, min_digits=1, max_digits=2)
    heldout = {problem.id for problem in task.heldout(50)}
    for index in range(start, start + 30):
        problem = task.problem(index)
        a, b = map(int, str(problem.prompt).rstrip("?\n").split("+"))
        assert f"{a}+{b}" not in heldout
        assert f"{b}+{a}" not in heldout
        assert problem.answer == str(a + b)


def test_problem_is_a_function_of_seed_and_index_only():
    one, two = Addition(3), Addition(3)
    [two.problem(i) for i in range(5)]
    assert one.problem(1000) == two.problem(1000)
    assert one.problem(1000) != Addition(4).problem(1000)


def test_heldout_is_the_same_for_every_seed_and_grows_by_a_suffix():
    assert Addition(1).heldout(20) == Addition(2).heldout(40)[:20]
    assert len({p.id for p in Addition(1).heldout(200)}) == 200


def test_share_of_heldout_and_accuracy_of_the_demonstrator():
    share = sum(pair_is_heldout(a, b) for a in range(100, 200) for b in range(100, 200)) / 10_000
    assert 0.09 < share < 0.16
    problems = [Addition(0).problem(i) for i in range(2000)]
    right = sum(p.solution.endswith(f"so {p.answer}") for p in problems) / 2000
    assert 0.52 < right < 0.66
    assert all(re.search(r"(?:^|\n)so \d+\Z", str(p.solution)) for p in problems)


def test_fingerprint_tells_settings_apart_but_not_seeds():
    assert Addition(1).fingerprint() == Addition(2).fingerprint()
    assert Addition(1).fingerprint() != Addition(1, max_digits=4).fingerprint()
    assert Addition(1).fingerprint() != Addition(1, p_slip=0.2).fingerprint()
