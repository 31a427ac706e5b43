"""Task and reward for the procedural data sets of the reasoning-gym library (extra `gym`)."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator

from retrain.errors import ComponentError
from retrain.functional.numbers import last_number
from retrain.functional.seeds import derive_seed, digest_of, is_heldout
from retrain.protocols import Task
from retrain.registry import Finding, reward, task
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
"""Supported data sets. A problem depends only on its number, not on the process or the iteration order of sets, and
takes milliseconds to generate. The scorer gives 1 to the reference answer and 0 to junk, and does not execute the
answer. Scorers of some other data sets of the library run an answer as Python code."""

INSTRUCTION = "Give the final answer between <answer> and </answer>."
_SIZE = 2**31
"""Number of problems of a data set."""
_TRIAL_PROBLEMS = 4
_TRIAL_S = 0.5
"""Limit of CPU time, in seconds, for the `_TRIAL_PROBLEMS` that are generated to check a config."""
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _check_reserved(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Check that `config` leaves the two settings to the task that the task itself sets."""
    if reserved := {"seed", "size"} & {*(params["config"] or ())}:
        yield Finding(("config",), f"the task itself sets {' and '.join(sorted(reserved))}", "remove it here")


@task("gym", extra=("reasoning_gym", "gym"), check=_check_reserved)
class Gym(Task):
    """Generate problems of one reasoning-gym data set. Use the reward `gym` to score them.

    A hash of the question decides whether a problem is held out, so training and held-out problems are disjoint for
    every seed. `extra` of a problem has the name of the data set and the entry that its scorer needs.

    Args:
        seed: seed of the training problems.
        name: name of the data set.
        config: settings of the data set, with the library's names; missing ones keep the library's defaults.
        instruction: text appended to every question after an empty line; "" for none.
    Raises:
        ComponentError: the data set is not supported, or its config is invalid or too slow.
    """

    def __init__(
        self, seed: int, *, name: Dataset, config: Mapping[str, Any] | None = None, instruction: str = INSTRUCTION
    ) -> None:
        self.seed, self.name, self.instruction = seed, name, instruction
        self.config = dict(config or {})
        self._data = _create(name, self.config)
        if config:
            _check_config(name, self._data)

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`."""
        # An eighth is held out, so 1000 draws fail only if a config has hardly any other problems.
        for attempt in range(1000):
            number = derive_seed(self.seed, "train", index, attempt) % _SIZE
            problem, held = self._draw(number)
            if not held:
                return problem
        raise ComponentError(
            f"[gym] {self.name}: 1000 draws gave only held-out problems", "choose a config with more problems"
        )

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` distinct held-out problems; fewer if the data set has fewer."""
        problems: dict[Any, Problem] = {}
        # Eight draws per held-out problem on average, and more as they begin to repeat.
        for draw in range(100 + 20 * count):
            if len(problems) >= count:
                break
            problem, held = self._draw(derive_seed(0, "heldout", draw) % _SIZE)
            if held:
                problems.setdefault(problem.prompt, problem)
        return list(problems.values())

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the problems, except the seed."""
        return digest_of("gym", self.name, self.config, self.instruction, importlib.metadata.version("reasoning-gym"))

    def _draw(self, number: int) -> tuple[Problem, bool]:
        """Return problem `number` of the data set, and whether it is held out."""
        entry = self._data[number]
        question: str = entry["question"]
        # By the question and not the number: many numbers have the same question.
        held = is_heldout(question)
        prompt = f"{question}\n\n{self.instruction}" if self.instruction else question
        extra = {"dataset": self.name, "entry": entry}
        return Problem(id=f"{self.name}/{number}", prompt=prompt, answer=entry["answer"], extra=extra), held


def _check_answer(answer: str) -> str:
    try:
        if answer not in ("tag", "number") and not re.compile(answer).groups:
            raise ValueError("it has no group")
    except (re.error, ValueError) as error:
        fix = 'use "tag", "number", or an expression with a group, such as "Answer: (.*)"'
        raise ValueError(f"{error}; {fix}") from None
    return answer


@reward("gym", extra=("reasoning_gym", "gym"))
class GymReward:
    """Return 1 if the data set's scorer gives the answer the full score, else 0.

    Args:
        partial: return the scorer's value in [0, 1] instead. Many scorers give a guess a value above 0.
        answer: which part of the completion is scored. "tag" takes the content of the last <answer>...</answer>, or the
            last line if there is no tag. "number" takes the last number, without commas. Any other value is a regular
            expression such as "Answer: (.*)", and the text of the first group in its last match is scored; the score is
            0 without a match.
    """

    def __init__(self, *, partial: bool = False, answer: Annotated[str, AfterValidator(_check_answer)] = "tag") -> None:
        self.partial = partial
        self._answer = answer
        library("reasoning_gym", "gym")  # imported here, because it takes seconds, which may exceed a call's deadline

    def __call__(self, completion: str, problem: Mapping[str, Any]) -> float:
        extra = cast("Mapping[str, Any]", problem["extra"])
        if "entry" not in extra:
            raise ValueError('the reward "gym" scores only problems of the task "gym"')
        answer = _answer_in(completion, self._answer)
        if answer is None:
            return 0.0
        score = float(_scorer(extra["dataset"]).score_answer(answer, extra["entry"]))
        return score if self.partial else float(score > 0.99)


def _answer_in(completion: str, answer: str) -> str | None:
    """Return the part of a completion that is scored, see `GymReward`; None if there is none."""
    if answer == "tag":
        tagged = _ANSWER_TAG.findall(completion)
        lines = completion.strip().splitlines()
        return tagged[-1].strip() if tagged else (lines[-1] if lines else "")
    if answer == "number":
        number = last_number(completion)
        return None if number is None else number.replace(",", "").replace("\u2212", "-")
    matches = [*re.finditer(answer, completion)]
    # A group that did not take part in the match is None.
    return (matches[-1][1] or "").strip() if matches else None


@cache
def _scorer(name: str) -> Any:
    return _create(name, {})


def _create(name: str, config: Mapping[str, Any]) -> Any:
    if name not in get_args(Dataset):
        raise ComponentError(f'[gym] name = "{name}" is not allowed', f"choose among: {', '.join(get_args(Dataset))}")
    gym = library("reasoning_gym", "gym")
    try:
        # The seed of the run chooses among the numbers of one data set, so that its held-out problems are the same.
        return gym.create_dataset(name, seed=0, size=_SIZE, **config)
    except (TypeError, AssertionError, ValueError) as error:
        fix = "see the library for its settings"
        raise ComponentError(f"[gym] {name} rejects its config: {error}", fix) from error


def _check_config(name: str, dataset: Any) -> None:
    """Generate a few problems in a child process with a limit of CPU time, then one in this process.

    A process with several threads skips the child: a fork would inherit their locks without the threads.

    Args:
        name: name of the data set, for errors.
        dataset: the data set.
    Raises:
        ComponentError: the problems take too long, or cannot be generated.
    """
    if threading.active_count() == 1:
        child = os.fork()
        if not child:
            try:
                # The default action ends the process, also inside the library's C code.
                signal.signal(signal.SIGPROF, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_PROF, _TRIAL_S)
                for number in range(_TRIAL_PROBLEMS):
                    dataset[number]
            finally:
                os._exit(0)  # the code below raises the same error in the parent
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            problem = f"[gym] {name} takes more than {_TRIAL_S:g} s for {_TRIAL_PROBLEMS} problems of this config"
            raise ComponentError(problem, "choose smaller numbers")
    try:
        dataset[0]
    except Exception as error:  # any exception of the library
        problem = f"[gym] {name} cannot generate a problem: {type(error).__name__}: {error}"
        raise ComponentError(problem, "see the library for its settings") from error
