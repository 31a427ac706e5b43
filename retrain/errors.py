"""Errors and their exit codes.

A message names the place, the problem and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class RetrainError(Exception):
    """Base of every error that `retrain` raises on purpose; `exit_code` is what the shell sees."""

    exit_code = 1


class UserCodeError(RetrainError):
    """A plug-in, reward or task of the user raised or returned something unusable (exit 1)."""

    exit_code = 1


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration, printed as `file:line:column: key: problem; fix`.

    Attributes:
        file: the TOML file, or `--set` for an override given on the command line.
        line, column: one-based; 0 where the place is not in a file.
        key: dotted key, such as `training.max_steps`.
        problem: what is wrong.
        fix: what to type instead; may be empty.
        exit_code: 3 if the data that it names are at fault, else 2.
    """

    file: str
    line: int
    column: int
    key: str
    problem: str
    fix: str = ""
    exit_code: int = 2

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.key}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class ConfigError(RetrainError):
    """All mistakes of a configuration at once (exit 2; 3 if data are missing and nothing else is wrong)."""

    exit_code = 2

    def __init__(self, problems: list[ConfigProblem]) -> None:
        self.problems = problems
        self.exit_code = min((problem.exit_code for problem in problems), default=2)
        super().__init__("\n".join(str(problem) for problem in problems))


class ComponentError(RetrainError):
    """A component cannot be found, imported, or called as its kind requires.

    The configuration layer turns it into a `ConfigProblem` with a place in the file (exit 2).

    Attributes:
        problem: what is wrong.
        fix: what to do about it; may be empty.
        trace: the traceback of the user's file when importing it raised; may be empty.
    """

    exit_code = 2

    def __init__(self, problem: str, fix: str = "", trace: str = "") -> None:
        self.problem, self.fix, self.trace = problem, fix, trace
        super().__init__(problem + (f"; {fix}" if fix else ""))


class MissingExtraError(ComponentError):
    """An optional dependency is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", install(extra))


def install(extra: str) -> str:
    """Return the pip command that installs an extra."""
    return f'pip install "retrain-rl[{extra}]"'


def did_you_mean(word: str, known: Sequence[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Suggest the known word closest to an unknown one, or return `otherwise` if none is close."""
    near = get_close_matches(word, known, 1, cutoff)
    return f'did you mean "{near[0]}"?' if near else otherwise


class DataError(RetrainError):
    """A data file or data set is not usable; the message names file and line (exit 3)."""

    exit_code = 3


class DivergedError(RetrainError):
    """Training stopped because loss or gradients stayed non-finite (exit 4)."""

    exit_code = 4


class EngineError(RetrainError):
    """The sampler failed, hung, or disagrees with the trainer (exit 5)."""

    exit_code = 5


class StorageError(RetrainError):
    """A run directory or checkpoint cannot be read, written or trusted (exit 6)."""

    exit_code = 6


class Preempted(RetrainError):  # noqa: N818 - an outcome, not a mistake
    """SIGTERM arrived; a checkpoint was written and the run can be resumed (exit 75)."""

    exit_code = 75
