"""A mixture of tasks."""

from collections import Counter

import pytest

from retrain.data.addition import Addition
from retrain.data.band import Band
from retrain.data.games import Numbers, Sums
from retrain.environments.mixture import Mixture, WeightedTask
from retrain.protocols import Task


def mixture(seed=3, sums=3.0):
    return Mixture(seed, {"a": WeightedTask(Sums(1), sums), "b": WeightedTask(Numbers(2), 1.0)})


def test_a_problem_depends_on_its_number_alone():
    whole = [mixture().problem(index) for index in range(40)]
    again = mixture()
    assert [again.problem(index) for index in reversed(range(40))] == whole[::-1]
    assert [mixture(seed=4).problem(index) for index in range(40)] != whole


def test_parts_are_drawn_by_their_weights_and_pose_their_problems_in_order():
    task = mixture()
    found = [task.problem(index) for index in range(2000)]
    counts = Counter(problem.environment for problem in found)
    assert counts["a"] == pytest.approx(1500, abs=100)  # five standard deviations
    for label, part in (("a", Sums(1)), ("b", Numbers(2))):
        own = [problem for problem in found if problem.environment == label][:50]
        assert [problem.id for problem in own] == [f"{label}/{part.problem(number).id}" for number in range(50)]
        assert own[0].facts["environment"] == label


def test_every_part_is_evaluated_alike():
    counts = Counter(problem.environment for problem in mixture(sums=100.0).heldout(9))
    assert counts == {"a": 5, "b": 4}


def test_the_data_are_known_by_parts_and_weights():
    assert mixture(1).fingerprint() == mixture(2).fingerprint()
    assert mixture(sums=2.0).fingerprint() != mixture().fingerprint()

    class Unknown(Addition):
        def fingerprint(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            return Task.fingerprint(self)

    assert Mixture(0, {"a": WeightedTask(Unknown(0), 1.0)}).fingerprint() is None


def test_figures_and_spans_are_those_of_the_part_that_posed_a_problem():
    class Knows(Addition):
        def figures(self, problems, answers):
            return {"seen": float(len(problems)), "answers": float(sum(map(len, answers)))}

        def spans(self, problem, text):
            return {"all": [(0, len(text))]}

    task = Mixture(0, {"a": WeightedTask(Knows(0), 1.0), "b": WeightedTask(Sums(0), 1.0)})
    problems = task.heldout(5)
    assert task.figures(problems, [["x", "y"] for _ in problems]) == {"a/seen": 3.0, "a/answers": 6.0}  # pyright: ignore
    assert task.spans(problems[0], "12") == {"all": [(0, 2)]}
    assert task.spans(problems[-1], "12") == {}


def test_every_part_learns_of_its_own_problems_and_remembers_them():
    def learning():
        return Mixture(3, {"a": WeightedTask(Band(Sums(1)), 1.0), "b": WeightedTask(Numbers(2), 1.0)})

    task = learning()
    found = [task.problem(index) for index in range(20)]
    rates = {problem.id: 0.5 for problem in found}
    count = sum(name.startswith("a/") for name in rates)
    assert task.learn(rates) == {"a/curriculum/in_band": 1.0, "a/curriculum/known": count}
    again = learning()
    again.load_state_dict(task.state_dict())
    assert again.state_dict() == task.state_dict() != learning().state_dict()
    assert {*again.state_dict()["a"]["rates"]} == {name.removeprefix("a/") for name in rates if name.startswith("a/")}
