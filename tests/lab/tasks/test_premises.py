"""The tasks with a premise: splits, demonstrations, what their figures and spans say, and their settings in a run."""

from dataclasses import replace

import pytest

from retrain import registry
from retrain.config.load import load
from retrain.data.addition import Addition, without_carries
from retrain.errors import ConfigError
from retrain.lab.tasks.explained_variance import explained
from retrain.registry import components, find
from retrain.types import Rollout, Turn

TASKS = [one for one in components("task") if registry.task.traits_of(one).premise]


def build(name, seed=0, **params):
    return find("task", name).bind(params).build({"seed": seed})


def answer(problem, text, correct=None):
    """A completion of a problem; right if it ends with the answer."""
    right = text.split()[-1] == problem.answer if correct is None else correct
    turns = (Turn(0, len(text), "stop", 0),)
    base = Rollout(problem.id, problem.prompt, problem.answer, (1,), tuple(range(len(text))), (), text, turns, 0)
    return replace(base, correct=right)


def shown(task, count):
    """(problems, their demonstrations as answers); of an episode the last reply."""
    problems = [task.problem(index) for index in range(count)]
    return problems, [[answer(problem, problem.solution or problem.replies[-1])] for problem in problems]


@pytest.mark.parametrize("component", TASKS, ids=lambda one: one.name)
def test_every_task_with_a_premise(component):
    task, other = build(component.name), build(component.name, seed=7)
    assert component.traits.knob in component.schema.model_fields
    held = task.heldout(100)
    assert len(held) == (64 if component.name == "guess" else 100)
    assert [one.id for one in held] == [one.id for one in other.heldout(100)]
    problems, answers = shown(task, 400)
    if component.name != "guess":  # what is to be guessed is in no prompt: nothing of it can be learnt by heart
        assert not {one.id for one in problems} & {one.id for one in held}
    assert problems[:50] != [other.problem(index) for index in range(50)]
    assert len({one.solution or one.replies for one in problems}) > 40
    assert 0.01 < sum(bool(one.correct) for [one] in answers) / 400 < 0.9
    assert task.fingerprint() == other.fingerprint() != Addition(0).fingerprint()
    figures = {f"task/{name}" for name in task.figures(problems, answers)}
    known = {"accuracy", "greedy_accuracy", "pass@1", "pass@64", *figures}
    assert set(component.traits.premise) <= known
    for low, high in component.traits.premise.values():
        assert low < high


@pytest.mark.parametrize("component", TASKS, ids=lambda one: one.name)
def test_settings_of_a_task_are_laid_under_the_file(component, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'[task]\nname = "{component.name}"\n')
    config = load(file).config
    assert config.training.max_steps == component.traits.settings["training"]["max_steps"]
    assert load(file, ["training.max_steps=3"]).config.training.max_steps == 3
    file.write_text(f'training = 3\n[task]\nname = "{component.name}"\n')
    with pytest.raises(ConfigError, match="training"):
        load(file)


def test_a_share_of_variance_worked_by_hand():
    assert explained([("", "a", 1.0)] * 4 + [("", "b", 0.0)] * 4) == 1
    # between 1, within 1, total 2; one degree between and six within: (1 - 1/6) / 2
    answers = [("", "a", x) for x in (0.0, 0.0, 0.0, 1.0)] + [("", "b", x) for x in (1.0, 1.0, 1.0, 0.0)]
    assert explained(answers) == pytest.approx((0.5 - 1.5 / 6) / 2)
    assert explained([("", "a", 1.0), ("", "b", 1.0)]) == 0
    # what decides one way for one kind and the other way for another explains everything within kinds
    assert explained([(kind, choice, float(kind == choice)) for kind in "ab" for choice in "ab"] * 3) == 1


def test_the_quick_way_of_strategy_is_never_right():
    for name in ("strategy", "rare"):
        for problem in [build(name).problem(index) for index in range(300)]:
            a, b = map(int, problem.id.split("+"))
            assert without_carries(a, b) != a + b
            assert problem.solution != f"so {problem.answer}"


def test_spans_of_redundant_checks_and_their_share():
    task = build("brevity")
    problem = replace(task.problem(0), answer="125")
    text = "let me think\n7+8=15\nlet me check\n7+8=15\n5+6+1=12\nso 125"
    [(start, end)] = task.spans(problem, text)["redundant"]
    assert text[start:end] == "let me check\n7+8=15\n"
    wrong = answer(problem, text + "1")
    assert task.figures([problem], [[answer(problem, text), wrong]]) == {"redundant": (end - start) / len(text)}


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("+3=5\n+4=9\nso 9", ""),
        ("+3=5\n+4=8\nso 8", "+4=8\n"),
        ("+3=6\n+4=9\nso 9", "+3=6\n"),
        ("+3=5\nso 5", "so 5"),
        ("so 9", "so 9"),
    ],
)
def test_the_first_mistake_of_a_chain(text, mistake):
    task = build("chain", steps=2)
    problem = replace(task.problem(0), id="2+3+4", answer="9")
    assert [text[start:end] for start, end in task.spans(problem, text)["mistake"]] == ([mistake] if mistake else [])


def test_a_chain_is_right_with_the_power_of_its_steps():
    figures = build("chain", p_slip=0.1).figures(*shown(build("chain", p_slip=0.1), 2000))
    assert figures["step"] == pytest.approx(0.9, abs=0.01)
    assert figures["gap"] < 0.04


def test_right_answers_of_episodes_with_a_call_and_without():
    task = build("calculator")
    problem = task.problem(0)
    called = Turn(0, 4, "stop", 0), Turn(6, 8, "stop", 0)
    direct = [answer(problem, "so 1", correct=False)] * 3
    with_calls = [replace(answer(problem, "=1+2\n3\nso 3", correct=right), turns=called) for right in (True, False)]
    assert task.figures([problem], [[*direct, *with_calls]]) == {"with_tool": 0.5, "without": 0.0}
    assert task.figures([problem], [direct]) == {"with_tool": 0.0, "without": 0.0}


def test_plans_decide_and_phrases_do_not():
    planning, decoy = build("planning"), build("decoy")
    decided = planning.figures(*shown(planning, 1500))
    assert decided["explained"] > 0.8
    assert decided["right_plan"] == pytest.approx(1 / 3, abs=0.05)
    assert abs(decoy.figures(*shown(decoy, 1500))["explained"]) < 0.02
    problem = planning.problem(0)
    [(start, end)] = planning.spans(problem, problem.solution)["planning"]
    assert problem.solution[start:end] in ("notice that", "what if we", "the key is")
    problem = next(one for one in map(decoy.problem, range(50)) if decoy.spans(one, one.solution)["planning"])
    assert {problem.solution[s:e] for s, e in decoy.spans(problem, problem.solution)["planning"]}


def test_a_share_of_training_rewards_is_flipped_and_no_other():
    task, reward = build("noisy"), find("reward", "flipped").bind()
    problems, answers = shown(task, 1500)
    rows = [{"id": one.id, "extra": one.extra} for one in problems]
    values = [reward(one.solution, one.answer, row) for one, row in zip(problems, rows, strict=True)]
    turned = [value != float(one.correct) for value, [one] in zip(values, answers, strict=True)]
    assert sum(turned) / 1500 == pytest.approx(0.1, abs=0.03) == task.figures(problems, answers)["flipped"]
    held = task.heldout(100)
    values = [reward(one.solution, one.answer, {"id": one.id, "extra": one.extra}) for one in held]
    assert values == [float(one.solution.endswith(f"so {one.answer}")) for one in held]
