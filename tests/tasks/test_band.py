"""The curriculum `band`: which problems it chooses, and what a resumed run finds of it."""

import json

from retrain.data.band import Band
from retrain.protocols import Task
from retrain.registry import bind
from retrain.types import Problem

RATES = {"easy": 1.0, "right": 0.5, "hard": 0.0}


class Rows(Task):
    """Thirty rows in one order, a third of them of each difficulty."""

    def problem(self, index):
        number = index % 30
        return Problem(f"{number} {[*RATES][number % 3]}", "?", "!")

    def heldout(self, count):
        return []


def band(**settings) -> Band:
    return bind("curriculum", "band", settings).build({"task": Rows(), "seed": 0})


def step(task: Band, number: int, size: int = 4) -> list[str]:
    """Draw a step's problems and learn how they went."""
    drawn = [task.problem(number * size + place).id for place in range(size)]
    task.learn({name: RATES[name.split()[1]] for name in drawn})
    return drawn


def share(drawn):
    return sum(name.endswith("right") for name in drawn) / len(drawn)


def test_problems_are_in_the_band_once_the_rows_are_known():
    task = band()
    found = [name for number in range(60) for name in step(task, number)]
    assert share(found[:8]) < 0.5
    assert share(found[-80:]) == 1.0
    assert len({*found[-80:]}) == 10  # all of them, not one again and again


def test_a_rate_is_forgotten_and_its_problem_tried_again():
    task = band(memory=20)
    found = [step(task, number) for number in range(200)]
    assert any(name.endswith("hard") for drawn in found[100:] for name in drawn)
    assert share([name for drawn in found[100:] for name in drawn]) > 0.5


def test_where_none_is_in_the_band_the_nearest_is_taken():
    task = band(low=0.6, high=0.7, candidates=3)
    task.learn({f"{number} {name}": rate for number in range(30) for name, rate in RATES.items()})
    assert {task.problem(index).id.split()[1] for index in range(20)} == {"right"}


def test_a_step_reports_how_many_of_its_problems_were_in_the_band():
    task = band(low=0.5)
    assert task.learn({"a": 0.5, "b": 1.0, "c": 0.0, "d": 0.75}) == {"curriculum/in_band": 0.5, "curriculum/known": 4.0}


def test_a_draw_depends_on_its_number_and_on_what_was_learned_alone():
    whole, again = band(), band()
    for number in range(20):
        step(whole, number)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [again.problem(n).id for n in reversed(range(80, 120))] == [whole.problem(n).id for n in range(119, 79, -1)]
    assert [step(again, number) for number in range(20, 40)] == [step(whole, number) for number in range(20, 40)]
    assert [band().problem(n).id for n in range(80, 120)] != [whole.problem(n).id for n in range(80, 120)]
