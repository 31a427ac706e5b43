"""The curriculum `band`: problems that are neither too easy nor too hard yet."""

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
    """Keeps the success rate between `low` and `high` by choosing among the next problems of the run's task.

    Draw number d looks at the problems d * candidates ... (d + 1) * candidates - 1 of the task and takes the first
    whose rate is unknown or in the band, otherwise the one whose rate is nearest to the band. The rate of a
    problem is the mean of the shares of right answers in its last two steps. It needs problems that come again, as the
    rows of a file do: of problems that are new every time no rate is known, and every first candidate is taken.

    Args:
        low, high: the band.
        candidates: problems to choose among; so much sooner a pass over the rows ends.
        memory: steps after which a rate is unknown again, since the policy has changed.
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
        """Draw number `index`; it depends on `index` and the rates alone."""
        first = index * self._candidates
        problems = (self._task.problem(number) for number in range(first, first + self._candidates))
        best, least = None, 2.0
        for problem in problems:
            if (off := self._off(problem.id)) < least:
                best, least = problem, off
            if not least:
                break
        assert best is not None
        return best

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """Remember the rates; returns how many are known, and the share of this step's that are in the band."""
        self._steps += 1
        for name, rate in rates.items():
            known = self._known(name)
            self._rates[name] = (rate if known is None else (known + rate) / 2, self._steps)
        inside = sum(self._low <= rate <= self._high for rate in rates.values()) / max(1, len(rates))
        known = sum(self._known(name) is not None for name in self._rates)
        return {"curriculum/in_band": inside, "curriculum/known": float(known)}

    def heldout(self, count: int) -> list[Problem]:
        """Return the task's."""
        return self._task.heldout(count)

    def finite(self) -> Iterable[Problem]:
        """All problems of the run's task, if they are in memory."""
        return self._task.finite()

    def pose(self, text: str) -> Any:
        """Forward to the task."""
        return self._task.pose(text)

    def fingerprint(self) -> str | None:
        """Return the task's."""
        return self._task.fingerprint()

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return the task's."""
        return self._task.figures(problems, answers)

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return the task's."""
        return self._task.spans(problem, text)

    def state_dict(self) -> State:
        """Steps, each problem's rate with the step of its last update, and the state of the task."""
        rates = {name: [*known] for name, known in self._rates.items()}
        return {"steps": self._steps, "rates": rates, "task": self._task.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` gave."""
        self._steps = int(state["steps"])
        self._rates = {str(name): (float(rate), int(step)) for name, (rate, step) in state["rates"].items()}
        self._task.load_state_dict(state["task"])

    def _known(self, name: str) -> float | None:
        rate, step = self._rates.get(name, (0.0, -self._memory))
        return rate if self._steps - step < self._memory else None

    def _off(self, name: str) -> float:
        """Distance of a problem's rate from the band; 0 inside, and for an unknown rate."""
        rate = self._known(name)
        return 0.0 if rate is None else max(self._low - rate, rate - self._high, 0.0)
