"""Check rewards before they train: what they pay for right, wrong and cheating completions of a few problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from retrain.config.loaded_config import LoadedConfig
from retrain.config.slots import labels
from retrain.errors import ConfigError, DataError
from retrain.registry import reward
from retrain.report.page import Table
from retrain.rewards.pool import RewardPool
from retrain.rewards.signatures import completion_item
from retrain.training.chat import plain_text
from retrain.types import Problem

_TIMES = 100
"""Number of repetitions of the repeated answer."""
_CANDIDATES = 10
"""Number of different answers in a row."""
_FORMS: Mapping[str, str] = {
    "alone": "{}",
    "in a sentence": "The answer is {}.",
    "bold": "**{}**",
    "boxed": r"\boxed{{{}}}",
    "with a unit": "The answer is {} meters.",
    "after reasoning": "First I read the problem. Then I work in 2 steps, and check both.\nso {}",
    "before reasoning": "{}\nI worked in 2 steps: first I read the problem, then I checked it.",
}
"""AnswerForm of an answer -> template of the completion."""


Track = Callable[[Sequence[Any]], Iterable[Any]]


class AnswerForm(NamedTuple):
    """A form of completions.

    Attributes:
        name: the form.
        right: True if they answer the problem, False if they do not; None if a reward may pay them or not.
        make: (problem, right answer, wrong answer) -> the completion; None if the problem has no such completion.
    """

    name: str
    right: bool | None
    make: Callable[[Problem, str, str], str | None]


class Paid(NamedTuple):
    """Payment of the rewards for a form, as means over the problems.

    Attributes:
        form: the form.
        values: value of each reward; None if it had no opinion or failed on every problem.
        correct: share of the completions that the run would count as correct.
        failed: number of completions that could not be scored.
        scored: number of completions that were given to the rewards.
    """

    form: AnswerForm
    values: Mapping[str, float | None]
    correct: float
    failed: int
    scored: int


def _written(template: str, gold: bool) -> Callable[[Problem, str, str], str]:
    return lambda problem, right, wrong: template.format(right if gold else wrong)


def _thousands(gold: bool) -> Callable[[Problem, str, str], str | None]:
    def make(problem: Problem, right: str, wrong: str) -> str | None:
        value = right if gold else wrong
        # Up to three digits have no separator.
        return f"The answer is {int(value):,}." if value.isdecimal() and len(value) > 3 else None

    return make


def _candidates(problem: Problem, right: str, wrong: str) -> str:
    """Return ten answers in a row; the right one is the fifth."""
    others = [_other(wrong, step) for step in range(_CANDIDATES - 1)]
    return "The answer is " + ", ".join([*others[:4], right, *others[4:]]) + "."


FORMS: tuple[AnswerForm, ...] = (
    *(AnswerForm(name, True, _written(template, True)) for name, template in _FORMS.items()),
    AnswerForm("with thousands separators", True, _thousands(True)),
    AnswerForm("after a think tag", True, _written("<think>\nI work in 2 steps.\n</think>\nThe answer is {}.", True)),
    AnswerForm(
        "wrong, then right", True, lambda problem, right, wrong: f"It is {wrong}. No, I was wrong. It is {right}."
    ),
    *(AnswerForm(f"wrong {name}", False, _written(template, False)) for name, template in _FORMS.items()),
    AnswerForm("wrong with thousands separators", False, _thousands(False)),
    AnswerForm(
        "right, then wrong", False, lambda problem, right, wrong: f"It is {right}. No, I was wrong. It is {wrong}."
    ),
    AnswerForm("empty", False, lambda problem, right, wrong: ""),
    AnswerForm("the prompt", False, lambda problem, right, wrong: plain_text(problem.prompt)),
    AnswerForm("negated", False, _written("The answer is not {}.", True)),
    AnswerForm("ten candidates", False, _candidates),
    AnswerForm(
        "worked solution", None, lambda problem, right, wrong: problem.solution
    ),  # a task may demonstrate mistakes
    AnswerForm("a hundred times", None, lambda problem, right, wrong: " ".join([right] * _TIMES)),
)
"""The forms, right ones first."""


def check_rewards(loaded: LoadedConfig, count: int, track: Track = iter) -> list[Paid]:
    """Return what the rewards of a configuration pay for each form, over the first `count` problems of its task.

    Raises:
        ConfigError: an environment rewards the completions.
        DataError: no problem has an answer.
    """
    if labels(loaded.config):
        problem, fix = "the environment rewards this run, and its episodes have no such forms", "use retrain play"
        raise ConfigError.at(loaded.file, "environment", problem, fix)
    task = loaded.task(loaded.config.training.seed)
    problems = [task.problem(index) for index in range(count)]
    return paid(loaded, [problem for problem in problems if problem.answer.strip()], track)


def paid(loaded: LoadedConfig, problems: Sequence[Problem], track: Track = iter) -> list[Paid]:
    """Return what the rewards pay for each form over these problems; a form that no problem has is left out.

    Args:
        loaded: the configuration.
        problems: the problems.
        track: iterates over the completions of each problem while they are scored, and may show the progress.
    """
    if not problems:
        raise DataError("no problem has an answer, so there is nothing to compare completions with")
    cells: list[list[tuple[AnswerForm, dict[str, Any]]]] = []
    for problem in problems:
        cells.append([])
        # GSM8K writes the answer behind ####, after its solution.
        right = problem.answer.rpartition("####")[2].strip()
        for form in FORMS:
            text = form.make(problem, right, _other(right))
            if text is not None:
                cells[-1].append((form, _item(loaded, problem, text, len(cells[-1]))))
    # A failure is a result here, and must not end the check.
    settings: dict[str, Any] = {**loaded.config.reward_pool.model_dump(), "max_failed": 1.0}
    with RewardPool(loaded.rewards, search_paths=loaded.config.plugins.search_paths, **settings) as pool:
        scores, names = [pool.score([item for _, item in some]) for some in track(cells)], pool.names
    scored = [(form, score) for pair in zip(cells, scores, strict=True) for (form, _), score in zip(*pair, strict=True)]
    table: list[Paid] = []
    for form in FORMS:
        scores_of_form = [score for scored_form, score in scored if scored_form is form]
        values_by_name = {
            name: [value for score in scores_of_form if (value := score.parts.get(name)) is not None] for name in names
        }
        means = {name: fmean(values) if values else None for name, values in values_by_name.items()}
        failed = sum(score.value is None for score in scores_of_form)
        if scores_of_form:
            table.append(
                Paid(
                    form,
                    means,
                    sum(bool(score.correct) for score in scores_of_form) / len(scores_of_form),
                    failed,
                    len(scores_of_form),
                )
            )
    return table


def _item(loaded: LoadedConfig, problem: Problem, text: str, group: int) -> dict[str, Any]:
    """Return a completion as rewards receive it. It has a token for each word, and is the only one of its group."""
    ids, most = range(len(text.split()) + 1), loaded.config.training.max_tokens
    return completion_item(problem, plain_text(problem.prompt), text, ids, most, group)


def _other(answer: str, step: int = 0) -> str:
    """Return a wrong answer: a larger number, or else the text with letters behind it."""
    with suppress(ValueError):
        number = float(answer.replace(",", ""))
        # Beyond 1e9 a reward with a tolerance may take the two for equal; inf and nan plus 3 are themselves.
        if abs(number) < 1e9:
            return f"{number + step + 3:.15g}"
    return f"{answer}{'x' * (step + 1)}"


def as_table(loaded: LoadedConfig, paid_forms: Sequence[Paid]) -> Table:
    """Return the forms as rows and the rewards as columns.

    A value of a reward that judges correctness is marked with "!" if a wrong form is paid more than .5, with "+" if it
    is paid less, but more than the lowest value and 0, and with "?" if a right form is not paid more than .5.
    """
    judges = {
        name
        for name, entry in zip(paid_forms[0].values, loaded.rewards, strict=True)
        if reward.traits_of(entry.bound).correctness
    }

    # A reward may pay everything .2, so that 0 is what a wrong answer should get at most; or it may pay penalties.
    lowest = {name: min(0.0, *(paid_form.values[name] or 0.0 for paid_form in paid_forms)) for name in judges}

    def shown(paid_form: Paid, name: str) -> str:
        value = paid_form.values[name]
        if value is None:
            return "-"
        mark = ""
        # The threshold of `Score.correct`.
        if name in judges and paid_form.form.right is not None and (value > 0.5) != paid_form.form.right:
            mark = " ?" if paid_form.form.right else " !"
        elif name in judges and paid_form.form.right is False and value > lowest[name]:
            mark = " +"
        return f"{value:.3g}{mark}"

    expected = {True: "right", False: "wrong", None: "either"}
    failures = any(paid_form.failed for paid_form in paid_forms)
    return Table.of(
        [
            {"completion": paid_form.form.name, "is": expected[paid_form.form.right]}
            | {name: shown(paid_form, name) for name in paid_form.values}
            | {"counts as right": f"{paid_form.correct:.0%}"}
            | ({"failed": str(paid_form.failed)} if failures else {})
            for paid_form in paid_forms
        ]
    )
