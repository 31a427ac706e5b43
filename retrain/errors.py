"""Errors and their exit codes. A message names the place, the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Self


class RetrainError(Exception):
    """Base class of the errors that `retrain` raises deliberately.

    Attributes:
        exit_code: exit code of the command.
    """

    exit_code = 1


class UserCodeError(RetrainError):
    """The user's plug-in, reward or task raised an exception or returned an invalid value (exit 1)."""

    exit_code = 1  # written here, because the table of exit codes lists the classes that have one of their own


@dataclass(frozen=True)
class ConfigProblem:
    """An error in a configuration, printed as `file:line:column: key: problem; fix`.

    Attributes:
        file: the TOML file, or `--set` for an override on the command line.
        line: line in the file, from 1; 0 if the error is not in a file.
        column: column in the line, from 1; 0 if the error is not in a file.
        key: dotted key, such as `training.max_steps`.
        problem: description of the problem.
        fix: advice how to fix it; may be "".
        exit_code: 3 if the data that the key names are invalid, else 2.
    """

    file: str
    line: int
    column: int
    key: str
    problem: str
    fix: str = ""
    exit_code: int = 2

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{position}: {self.key}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class ConfigError(RetrainError):
    """A configuration has errors (exit 2; exit 3 if all of them concern data).

    Args:
        problems: the errors.
    """

    exit_code = 2

    def __init__(self, problems: list[ConfigProblem]) -> None:
        self.problems = problems
        # 2 goes before 3: the configuration is fixed first, because it names the data.
        self.exit_code = min((problem.exit_code for problem in problems), default=2)
        super().__init__("\n".join(str(problem) for problem in problems))

    @classmethod
    def at(cls, subject: object, key: str, problem: str, fix: str = "") -> Self:
        """Return the error for a single problem that has no line: of a path, an option or an argument.

        Args:
            subject: what the message begins with, such as a path or the name of a command.
            key, problem, fix: see `ConfigProblem`.
        """
        return cls([ConfigProblem(str(subject), 0, 0, key, problem, fix)])


def raise_all(problems: Iterable[ConfigProblem], notes: Iterable[str] = ()) -> None:
    """Raise ConfigError with the distinct problems, sorted by place, and the notes; return if there are no problems."""
    # Several conditions, or evaluation sets, can have the same mistake, which is reported once.
    distinct = dict.fromkeys(problems)
    if not distinct:
        return
    error = ConfigError(sorted(distinct, key=lambda problem: (problem.file, problem.line, problem.column)))
    for note in dict.fromkeys(notes):
        error.add_note(note)
    raise error


class ComponentError(RetrainError):
    """A component cannot be found, imported, or called as its kind requires (exit 2).

    The configuration layer converts the error to a `ConfigProblem` with a position in the file.

    Attributes:
        problem: description of the problem.
        fix: advice how to fix it; may be "".
        trace: traceback in the user's file if importing it raised an exception; "" otherwise.
    """

    exit_code = 2

    def __init__(self, problem: str, fix: str = "", trace: str = "") -> None:
        self.problem, self.fix, self.trace = problem, fix, trace
        super().__init__(problem + (f"; {fix}" if fix else ""))


class ForeignCodeError(ComponentError):
    """A stored configuration names code that needs `--trust`."""


class MissingExtraError(ComponentError):
    """An optional dependency is not installed (exit 2). The message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", install(extra))


def install(extra: str) -> str:
    """Return the pip command that installs an extra; in a clone, it names the clone."""
    # An installed package lies in site-packages, which has no pyproject.toml.
    clone = Path(__file__).parents[1]
    in_clone = (clone / "pyproject.toml").is_file()
    return f"pip install -e '{clone}[{extra}]'" if in_clone else f"pip install 'retrain-rl[{extra}]'"


def did_you_mean(word: str, choices: Sequence[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return a suggestion of the choice that is most similar to an unknown word.

    Args:
        word: the unknown word.
        choices: the words that exist.
        otherwise: result if no choice is similar enough.
        cutoff: minimum similarity in [0, 1].
    """
    near = get_close_matches(word, choices, 1, cutoff)
    return f'did you mean "{near[0]}"?' if near else otherwise


class DataError(RetrainError):
    """A data file or data set is invalid (exit 3). The message names the file and line."""

    exit_code = 3


class DivergedError(RetrainError):
    """Training stopped because the loss or the gradients stayed non-finite (exit 4)."""

    exit_code = 4


class EngineError(RetrainError):
    """The sampler failed, hung, or disagrees with the trainer (exit 5)."""

    exit_code = 5


class StorageError(RetrainError):
    """A run directory or checkpoint cannot be read, written or trusted (exit 6)."""

    exit_code = 6


class Preempted(RetrainError):  # noqa: N818 - an outcome, not an error
    """The process got SIGTERM, wrote a checkpoint, and can be resumed (exit 75)."""

    exit_code = 75
