"""Curriculum `band`: prefer problems that are neither too easy nor too hard for the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from retrain.protocols import Task
from retrain.registry import curriculum
from retrain.types import Metrics, Problem, Rollout, State

SolveRate = Annotated[float, Field(ge=0, le=1)]
AtLeastOne = Annotated[int, Field(ge=1)]


@curriculum("band")
class Band(Task):
    """Keep success rates between `low` and `high` by choosing among the next problems of the run's task.

    Draw d considers the problems d * candidates ... (d + 1) * candidates - 1 of the task. It takes the first one whose
    success rate is unknown or in the band, otherwise the one whose rate is nearest to the band. The rate of a problem
    is updated with every step that uses it: r <- (r + share of right answers) / 2, starting from the first share.

    The curriculum needs problems that repeat, such as the rows of a file. If every problem is new, no rate is known and
    the first candidate is always taken.

    Args:
        low: lower bound of the band.
        high: upper bound of the band.
        candidates: number of problems to choose among; a pass over the rows ends that many times sooner.
        memory: number of steps after which a rate is discarded, because the policy has changed since.
    References: Bae et al., Online Difficulty Filtering for Reasoning Oriented Reinforcement Learning, arXiv:2504.03380.
    """

    def __init__(
        self,
        task: Task,
        *,
        low: SolveRate = 0.2,
        high: SolveRate = 0.8,
        candidates: AtLeastOne = 4,
        memory: AtLeastOne = 100,
    ) -> None:
        self._task, self._low, self._high = task, low, high
        self._candidates, self._memory = candidates, memory
        self._steps, self._rates = 0, dict[str, tuple[float, int]]()

    def problem(self, index: int) -> Problem:
        """Return the problem of draw `index`. It depends only on `index`, the task and the success rates."""
        first = index * self._candidates
        # Lazily, because the search usually stops at the first candidate.
        problems = (self._task.problem(number) for number in range(first, first + self._candidates))
        best = None
        least = 2.0  # above every distance between two shares
        for problem in problems:
            if (distance := self._distance(problem.id)) < least:
                best, least = problem, distance
            if not least:
                break
        assert best is not None
        return best

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """Update the success rates after a step.

        Args:
            rates: share of right answers of each problem of the step, by id.
        Returns:
            The share of these rates that are in the band, and the number of problems whose rate is known.
        """
        self._steps += 1
        for name, rate in rates.items():
            previous = self._rate_of(name)
            # Half of the old rate: a group is a small sample, and the policy changes.
            self._rates[name] = (rate if previous is None else (previous + rate) / 2, self._steps)
        inside = sum(self._low <= rate <= self._high for rate in rates.values()) / max(1, len(rates))
        count = sum(self._rate_of(name) is not None for name in self._rates)
        return {"curriculum/in_band": inside, "curriculum/known": float(count)}

    def heldout(self, count: int) -> list[Problem]:
        """Return the held-out problems of the run's task."""
        return self._task.heldout(count)

    def finite(self) -> Iterable[Problem]:
        """Iterate over all problems of the run's task, if they are in memory."""
        return self._task.finite()

    def pose(self, text: str) -> Any:
        """Return the prompt that the run's task makes of a question."""
        return self._task.pose(text)

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the run's task."""
        return self._task.fingerprint()

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return the metrics of the run's task."""
        return self._task.figures(problems, answers)

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return the spans of the run's task."""
        return self._task.spans(problem, text)

    def state_dict(self) -> State:
        """Return the step count, each problem's rate with the step of its last update, and the state of the task."""
        rates = {name: [*entry] for name, entry in self._rates.items()}
        return {"steps": self._steps, "rates": rates, "task": self._task.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore the result of `state_dict`."""
        self._steps = int(state["steps"])
        self._rates = {str(name): (float(rate), int(step)) for name, (rate, step) in state["rates"].items()}
        self._task.load_state_dict(state["task"])

    def _rate_of(self, name: str) -> float | None:
        """Return the success rate of a problem; None if it is unknown or older than `memory` steps."""
        # A problem without a rate is like one whose rate is just too old.
        rate, step = self._rates.get(name, (0.0, -self._memory))
        return rate if self._steps - step < self._memory else None

    def _distance(self, name: str) -> float:
        """Return the distance of a problem's rate from the band; 0 if the rate is in the band or unknown."""
        rate = self._rate_of(name)
        return 0.0 if rate is None else max(self._low - rate, rate - self._high, 0.0)
