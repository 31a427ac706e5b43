"""Sections of evaluation on held-out problems, and of early stopping by a metric."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain.config.sections.problems import Reward
from retrain.config.sections.section import Array, Count, Natural, Params, Positive, Problems, Section, Seed


class StopWhen(Section):
    """`[training] stop_when`: end the run before max_steps. Exactly one of above, below and patience is set."""

    metric: Annotated[str, Field(min_length=1)]
    """Metric of a step, such as reward/mean, or of an evaluation, such as eval/accuracy or eval/NAME/pass@4."""
    above: float | None = None
    """End the run when the metric is at least this."""
    below: float | None = None
    """End the run when the metric is at most this."""
    patience: Count | None = None
    """End the run after this many consecutive values without a new maximum."""

    @property
    def event(self) -> str:
        """Kind of row that contains the metric: "eval" or "step"."""
        return "eval" if self.metric.startswith("eval/") else "step"

    @property
    def key(self) -> str:
        """Name of the metric in its row."""
        return self.metric.removeprefix("eval/")


class EvalSet(Section):
    """One `[[eval.sets]]` entry: a further set of held-out problems. Unset keys have their value in `[eval]`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")]
    """Name of the set in metrics, such as eval/NAME/accuracy."""
    task: Annotated[str, Field(min_length=1)] | None = None
    """A registered task or the dotted path of one. A registered task that reads a data set holds out all of its rows.
    Unset: the task of the run."""
    task_params: Params = {}
    """Parameters of the task, in addition to those in its own table."""
    rewards: Annotated[tuple[Reward, ...], Array] = ()
    """Rewards that decide which completions are correct. Empty: the rewards of the run."""
    problems: Annotated[Problems, Field(ge=1)] = 256
    """Number of held-out problems; all of them if there are fewer."""
    samples: Count | None = None
    """Number of sampled completions per problem."""
    temperature: Positive | None = None
    """Temperature of the sampled completions."""
    greedy: bool | None = None
    """Also score one completion per problem from greedy decoding."""
    pass_at: Annotated[tuple[Count, ...], Array] | None = None
    """Report pass@k for each of these k, which must not exceed samples."""
    max_tokens: Count | None = None
    """Longest completion in tokens."""


class Eval(Section):
    """`[eval]`: evaluation on held-out problems before, during and after training."""

    every: Natural = 20
    """Steps between evaluations; 0: evaluate only at the start and the end."""
    problems: Problems = 256
    """Number of held-out problems, which are the same for every seed; 0: no evaluation."""
    samples: Count = 1
    """Number of sampled completions per problem."""
    temperature: Positive = 1.0
    """Temperature of the sampled completions."""
    greedy: bool = True
    """Also score one completion per problem from greedy decoding."""
    pass_at: Annotated[tuple[Count, ...], Array] = (1,)
    """Report pass@k for each of these k, which must not exceed samples."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of nucleus sampling; 1: no truncation."""
    top_k: Natural = 0
    """Sample from the k most likely tokens; 0: from all."""
    seed: Seed = 0
    """Seed of evaluation, separate so that runs with different `[training] seed` are evaluated alike."""
    max_tokens: Count | None = None
    """Longest completion in tokens; unset: `[training] max_tokens`."""
    sets: Annotated[tuple[EvalSet, ...], Array] = ()
    """Further sets of held-out problems, each with its own name, task and rewards."""

    def figures(self) -> tuple[str, ...]:
        """Return the names of all evaluation metrics but those of a task."""
        return (*self.shares(), "ci_high", "avg_tokens", "truncated", "failed", "turns")

    def shares(self) -> tuple[str, ...]:
        """Return the names of evaluation metrics that are shares of correct completions."""
        greedy = ("greedy_accuracy",) if self.greedy else ()
        return ("accuracy", "ci_low", f"avg@{self.samples}", *(f"pass@{k}" for k in self.pass_at), *greedy)
