"""Sections that say what is measured on held-out problems, and when a metric ends a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain.config.sections.problems import Reward
from retrain.config.sections.section import Array, Count, Natural, Params, Positive, Problems, Section, Seed


class StopWhen(Section):
    """`[training] stop_when`: a metric that ends the run before max_steps, by one of above, below and patience."""

    metric: Annotated[str, Field(min_length=1)]
    """Of a step, as reward/mean; or of an evaluation, as eval/accuracy or eval/NAME/pass@4."""
    above: float | None = None
    """It ends when the metric is at least this."""
    below: float | None = None
    """It ends when the metric is at most this."""
    patience: Count | None = None
    """It ends when so many values in a row did not exceed the greatest before them."""
    rows: Count = 1
    """So many values in a row have to reach the bound."""

    @property
    def event(self) -> str:
        """What reports the metric."""
        return "eval" if self.metric.startswith("eval/") else "step"

    @property
    def key(self) -> str:
        """The metric's name in its row."""
        return self.metric.removeprefix("eval/")


class EvalSet(Section):
    """One `[[eval.sets]]` entry: further held-out problems. An unset key is that of `[eval]`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")]
    """What metrics call it: eval/NAME/accuracy."""
    task: Annotated[str, Field(min_length=1)] | None = None
    """A registered task or the dotted path of one; of a file every row is held out. Unset: the task of the run."""
    task_params: Params = {}
    """Parameters of the task; those in its own table hold as well."""
    rewards: Annotated[tuple[Reward, ...], Array] = ()
    """They decide which completions are correct; none: the rewards of the run."""
    problems: Annotated[Problems, Field(ge=1)] = 256
    """Held-out problems; fewer if there are fewer."""
    samples: Count | None = None
    """Sampled completions per problem."""
    temperature: Positive | None = None
    """Temperature of the sampled completions."""
    greedy: bool | None = None
    """Also score one greedy completion per problem."""
    pass_at: Annotated[tuple[Count, ...], Array] | None = None
    """Report pass@k for these k; none may exceed samples."""
    max_tokens: Count | None = None
    """Response budget."""


class Eval(Section):
    """`[eval]`: held-out problems, before, during and after training."""

    every: Natural = 20
    """Steps between evaluations; 0 evaluates at the start and the end only."""
    problems: Problems = 256
    """Held-out problems, the same for every seed; 0 switches evaluation off."""
    samples: Count = 1
    """Sampled completions per problem."""
    temperature: Positive = 1.0
    """Temperature of the sampled completions."""
    greedy: bool = True
    """Also score one greedy completion per problem."""
    pass_at: Annotated[tuple[Count, ...], Array] = (1,)
    """Report pass@k for these k; none may exceed samples."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Natural = 0
    """Sample among the k likeliest tokens; 0 switches it off."""
    seed: Seed = 0
    """Its own seed, so that runs with different `[training] seed` are measured alike."""
    max_tokens: Count | None = None
    """Response budget; unset: that of training."""
    sets: Annotated[tuple[EvalSet, ...], Array] = ()
    """Further held-out problems, each set with a name, a task and rewards."""

    def shares(self) -> tuple[str, ...]:
        """Names of the figures of an evaluation that are shares of right answers: more is better."""
        greedy = ("greedy_accuracy",) if self.greedy else ()
        return ("accuracy", "ci_low", f"avg@{self.samples}", *(f"pass@{k}" for k in self.pass_at), *greedy)
