"""Procedural tasks of reasoning-gym, and the reward that scores them (extra `gym`)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, cast, get_args

from retrain.errors import ComponentError
from retrain.functional.numbers import last_number
from retrain.functional.seeds import derive_seed, digest_of
from retrain.protocols import Task
from retrain.registry import reward, task
from retrain.system.extras import library
from retrain.types import Problem

Dataset = Literal[
    "arc_1d", "base_conversion", "basic_arithmetic", "binary_alternation", "caesar_cipher", "calendar_arithmetic",
    "chain_sum", "color_cube_rotation", "count_bits", "count_primes", "course_schedule", "decimal_chain_sum", "dice",
    "emoji_mystery", "family_relationships", "gcd", "largest_island", "lcm", "leg_counting", "letter_counting",
    "mahjong_puzzle", "maze", "mini_sudoku", "number_filtering", "number_format", "number_sequence", "products",
    "rotate_matrix", "rotten_oranges", "sentence_reordering", "simple_equations", "simple_geometry",
    "string_manipulation", "string_splitting", "string_synthesis", "syllogism", "word_sorting",
]  # fmt: skip
"""Data sets whose problems depend on their number alone (in every process: not on the order of sets) and take
milliseconds to make, and whose scorers give 1 to the oracle's answer and 0 to junk, and do not evaluate the
answer. Scorers of other data sets of the library run an answer as Python code."""

INSTRUCTION = "Give the final answer between <answer> and </answer>."
HELDOUT_SHARE = 8
"""One question in this many is held out."""

_NUMBERS = 2**31
_TRIED, _TRIED_S = 4, 0.5
"""Problems that are made for a trial of a config, and seconds of processor time for them."""
_ANSWER_FIX = 'use "tag", "number", or an expression with one group, such as "Answer: (.*)"'
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@task("gym", extra=("reasoning_gym", "gym"))
class Gym(Task):
    """Problems of one reasoning-gym data set, endless; score them with the reward `gym`.

    A hash of the question decides whether a problem is held out, so the two sides are disjoint whatever
    the seed. `extra` carries the data set's name and the entry that its scorer wants.

    Args:
        seed: of the training problems.
        name: of the data set.
        config: its own settings, as the library names them; the defaults where left out.
        instruction: appended to every question after an empty line; "" for none.
    """

    def __init__(
        self, seed: int, *, name: Dataset, config: Mapping[str, Any] | None = None, instruction: str = INSTRUCTION
    ) -> None:
        self.seed, self.name, self.instruction = seed, name, instruction
        self.config = dict(config or {})
        self._data = _create(name, self.config)
        if config:
            _try(name, self._data)

    def problem(self, index: int) -> Problem:
        """Training problem number `index`."""
        for attempt in range(1000):
            number = derive_seed(self.seed, "train", index, attempt) % _NUMBERS
            problem, held = self._draw(number)
            if not held:
                return problem
        raise ComponentError(f"[gym] {self.name}: 1000 draws gave held-out problems only", "widen its config")

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems; fewer if the data set repeats itself."""
        found: dict[Any, Problem] = {}
        for draw in range(100 + 20 * count):
            if len(found) >= count:
                break
            problem, held = self._draw(derive_seed(0, "heldout", draw) % _NUMBERS)
            if held:
                found.setdefault(problem.prompt, problem)
        return list(found.values())

    def fingerprint(self) -> str:
        """Hash of everything that determines the problems, except the seed."""
        return digest_of("gym", self.name, self.config, self.instruction, importlib.metadata.version("reasoning-gym"))

    def _draw(self, number: int) -> tuple[Problem, bool]:
        entry = self._data[number]
        question: str = entry["question"]
        held = hashlib.sha256(question.encode()).digest()[0] % HELDOUT_SHARE == 0
        prompt = f"{question}\n\n{self.instruction}" if self.instruction else question
        extra = {"dataset": self.name, "entry": entry}
        return Problem(id=f"{self.name}/{number}", prompt=prompt, answer=entry["answer"], extra=extra), held


@reward("gym", extra=("reasoning_gym", "gym"))
class GymReward:
    """1 if the data set's own scorer gives the answer full marks, else 0.

    Args:
        partial: the scorer's own value in [0, 1] instead; many scorers pay for guesses.
        answer: which part of the completion is scored. "tag": what stands in the last <answer>...</answer>, or without
            one the last line. "number": the last number, without its commas. Anything else
            is a regular expression with one group: what the group captures in its last match, which may span lines only
            where the expression allows it. Without a match the score is 0.
    """

    def __init__(self, *, partial: bool = False, answer: str = "tag") -> None:
        self.partial = partial
        self._find = _finder(answer)
        library("reasoning_gym", "gym")  # its import takes seconds, more than the deadline of a call may be

    def __call__(self, completion: str, problem: Mapping[str, Any]) -> float:
        extra = cast("Mapping[str, Any]", problem["extra"])
        if "entry" not in extra:
            raise ValueError('the reward "gym" scores problems of the task "gym" only')
        answer = self._find(completion)
        if answer is None:
            return 0.0
        value = float(_scorer(extra["dataset"]).score_answer(answer, extra["entry"]))
        return value if self.partial else float(value > 0.99)


def _finder(answer: str) -> Callable[[str], str | None]:
    """Return the function that finds the answer in a completion."""
    if answer == "tag":
        return _tagged
    if answer == "number":
        return _number
    try:
        pattern = re.compile(answer)
    except re.error as error:
        raise ComponentError(f"[gym] answer = {answer!r} is not a regular expression: {error}", _ANSWER_FIX) from error
    if pattern.groups != 1:
        raise ComponentError(f"[gym] answer = {answer!r} has {pattern.groups} groups", _ANSWER_FIX)

    def captured(completion: str) -> str | None:
        found = pattern.findall(completion)
        return found[-1].strip() if found else None

    return captured


def _tagged(completion: str) -> str:
    tagged = _ANSWER.findall(completion)
    lines = completion.strip().splitlines()
    return tagged[-1].strip() if tagged else (lines[-1] if lines else "")


def _number(completion: str) -> str | None:
    found = last_number(completion)
    return None if found is None else found.replace(",", "").replace("\u2212", "-")


@cache
def _scorer(name: str) -> Any:
    return _create(name, {})


def _create(name: str, config: Mapping[str, Any]) -> Any:
    if name not in get_args(Dataset):
        raise ComponentError(f'[gym] name = "{name}" is not allowed', f"choose among: {', '.join(get_args(Dataset))}")
    gym = library("reasoning_gym", "gym")
    try:
        return gym.create_dataset(name, seed=0, size=_NUMBERS, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise ComponentError(f"[gym] {name} refuses its config: {error}", "see the library for its settings") from error


def _try(name: str, data: Any) -> None:
    """Make problems of a config in a process that can be ended in a long loop or in the middle of a long number.

    A process with other threads makes none: a fork would have their locks, but not the threads.

    Raises:
        ComponentError: they take too long, or cannot be made.
    """
    if threading.active_count() == 1:
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_PROF, _TRIED_S)
                for number in range(_TRIED):
                    data[number]
            finally:
                os._exit(0)  # an error is raised once more below
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            problem = f"[gym] {name} takes more than {_TRIED_S:g} s to make {_TRIED} problems of this config"
            raise ComponentError(problem, "choose smaller numbers")
    try:
        data[0]
    except Exception as error:  # of the library
        problem = f"[gym] {name} makes no problem of this config: {type(error).__name__}: {error}"
        raise ComponentError(problem, "see the library for its settings") from error
