"""Traits: facts about a component that its decorator states, one frozen class per kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

from retrain.errors import ComponentError, did_you_mean

T = TypeVar("T", bound="Traits")


class Finding(NamedTuple):
    """An error or a warning about a configuration, from a component's check or a section's rule.

    Attributes:
        at: for a component's check, the parameter, and the index if it is a list; () is the key
            that names the component. For a section's rule, the full path of the key.
        problem, fix: as in `ConfigProblem`.
        fatal: True for an error, False for a warning.
        exit_code: as in `ConfigProblem`.
    """

    at: tuple[str | int, ...]
    problem: str
    fix: str
    fatal: bool = True
    exit_code: int = 2


ComponentCheck = Callable[[Mapping[str, Any], Any], Iterable[Finding]]
"""(parameters of a component, configuration) -> findings; it must not import torch."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a component of any kind.

    Attributes:
        table: TOML table of its parameters; None for the table of its name.
        extra: (package, extra of retrain) that it needs.
        check: reports contradictions between its parameters and the sections of the configuration
            (such as `config.training.max_tokens`).
        check_files: checks the files that it reads; called only if the run uses the component.
        check_code: checks that run the user's code; called last.
        when: parameter -> (another parameter, values of that one for which the first is read).
        imports: parameters that are dotted paths to the user's code. In a run that somebody else
            trained, they need `--trust`.
        reaches: parameter -> its effect outside the run, such as on a server; needs trust as well.
    """

    table: str | None = None
    extra: tuple[str, str] | None = None
    check: ComponentCheck | None = None
    check_files: ComponentCheck | None = None
    check_code: ComponentCheck | None = None
    when: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict[str, tuple[str, tuple[Any, ...]]])
    imports: tuple[str, ...] = ()
    reaches: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class TaskTraits(Traits):
    """Traits of a task.

    Attributes:
        remote: its problems may have to be downloaded, which `validate` does not do.
        settings: defaults for keys of sections that the run file does not set.
        premise: measured figure -> (lowest, highest) value for which the task separates methods.
        knob: the parameter that makes the premise true or false.
    """

    remote: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    premise: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    knob: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceTraits(Traits):
    """Facts of a source of rows.

    Attributes:
        brings: the rows that it may add: "rollouts" that other weights sampled, for which the update corrects, or
            "expert" rows, on which a loss term with `source="expert"` trains.
        ratio: name of its parameter with the share of a step's rows that are its own: so many fewer prompts are
            sampled. "" if it takes the place of none.
        read: reads the files that its parameters name, as building it does, and raises DataError with the first bad
            rows; (key, function). `validate` calls it, and a run before it loads the model.
    """

    brings: tuple[Literal["rollouts", "expert"], ...] = ("rollouts", "expert")
    ratio: str = ""
    read: tuple[str, Callable[[str], object]] | None = None


@dataclass(frozen=True, kw_only=True)
class RewardTraits(Traits):
    """Traits of a reward.

    Attributes:
        correctness: its score measures correctness. The first such reward that does not return None
            determines the accuracy.
        network: it needs the network, so it runs outside the sandbox.
        timeout_s: timeout of a call in seconds; None for the pool's.
        answers: reference answer -> reason why it cannot be used for comparison, or "".
        problems: (its parameters, the `Problem.facts` of a problem) -> reason why it cannot score completions of the
            problem, or "".
        parts: its parameters -> the parts of its score, by the names under which it returns them, with their weights
            in the score. They are columns of `reward_parts` in its place. {}: the score is one column.
    """

    correctness: bool = True
    network: bool = False
    timeout_s: float | None = None
    answers: Callable[[str], str] | None = None
    problems: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None
    parts: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class EnvironmentTraits(Traits):
    """Traits of an environment.

    Attributes:
        replay: episodes can be replayed from their seed and the model's actions.
        rewards: the environment returns the reward, so an episode that ends at a limit gets 0;
            otherwise [[rewards]] score it.
    """

    replay: bool = True
    rewards: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineTraits(Traits):
    """Traits of an engine.

    Attributes:
        exact: its log-probs equal the trainer's.
        concurrent: it can sample during an update, with its own weights and no global random state.
        remote: it samples on servers and uses neither the trainer's memory nor its device.
        own_process_group: it sets up torch.distributed itself, so multi-rank runs cannot use it.
        adapters: value of its parameter `lora` -> description of how it applies LoRA.
        serve_keys: keys of its table that `retrain serve` reads and the engine does not.
    """

    exact: bool = False
    concurrent: bool = False
    remote: bool = False
    own_process_group: bool = False
    adapters: Mapping[str | None, str] = field(default_factory=dict[str | None, str])
    serve_keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FilterTraits(Traits):
    """Traits of a filter.

    Attributes:
        drops: it can drop groups.
    """

    drops: bool = True


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits(Traits):
    """Traits of an advantage.

    Attributes:
        success_rate: it divides by the group's mean reward, read as a success rate.
        unit_variance: it divides by a standard deviation; or the boolean parameter that decides it.
        batch_statistics: it uses statistics of the whole batch.
        mean_matters: the mean of its result carries information, which centring would remove.
        group_of_one: it is defined for a group with one completion.
        least_rewards: fewest columns of `reward_parts` with which it differs from other advantages.
    """

    success_rate: bool = False
    unit_variance: bool | str = False
    batch_statistics: bool = False
    mean_matters: bool = False
    group_of_one: bool = False
    least_rewards: int = 1


@dataclass(frozen=True, kw_only=True)
class TransformTraits(Traits):
    """Traits of a transform.

    Attributes:
        writes: the column that it returns.
        correction: it corrects for the difference between the sampler and the trainer.
        drops_only: it is a correction that masks tokens without weighting them, so it can be
            combined with one that weights.
        unit_variance, mean_matters, group_of_one: as for an advantage.
        wants_unit_variance: its bounds are in standard deviations of the advantages that it reads.
        beyond_rewards: it gives nonzero advantages to groups whose rewards are all equal.
        imitates: it pulls the policy towards another model.
        returns: its results are returns minus values, usually followed by `whiten`.
    """

    writes: str = "advantages"
    correction: bool = False
    drops_only: bool = False
    unit_variance: bool | str = False
    mean_matters: bool = False
    group_of_one: bool = False
    wants_unit_variance: bool = False
    beyond_rewards: bool = False
    imitates: bool = False
    returns: bool = False


@dataclass(frozen=True, kw_only=True)
class LossTraits(Traits):
    """Traits of a loss term.

    Attributes:
        weight: default of its parameter `weight`; a term of weight 0 is not computed.
        source: rows that it trains on: sampled by the policy, or expert demonstrations.
        vanishes: it is 0 where advantages are 0.
        trust_region: it limits the distance from `old_logprobs`; inactive in a batch's first update.
    """

    weight: float = 1.0
    source: Literal["policy", "expert"] = "policy"
    vanishes: bool = False
    trust_region: bool = False


@dataclass(frozen=True, kw_only=True)
class SignalTraits(Traits):
    """Traits of a signal.

    Attributes:
        stored: name of its flags in the stored rollouts, or of the metric with its value.
        models: models that it needs besides the current policy, or a function from its parameters to
            them: "frozen" (the initial policy, one copy for all signals), "trained" or "averaged"
            (a copy of its own), "policy" (another pass of the policy), or the path of another
            model, frozen in bfloat16.
        judges: it measures the quality of a completion.
    """

    stored: str = ""
    models: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]] = ()
    judges: bool = True

    def held(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return `models` for a signal with these parameters."""
        return self.models(params) if callable(self.models) else self.models


@dataclass(frozen=True, kw_only=True)
class ExecutorTraits(Traits):
    """Traits of an executor.

    Attributes:
        local: its runs share this machine's cache, so that a warm start is computed once, before them.
    """

    local: bool = False


_RENAMED = {"elsewhere": "remote", "alone": "own_process_group", "here": "local"}
_DROPPED = frozenset({"needed_by", "also", "exclusive", "context", "aliases", "mixes", "default"})


def current_names(kind: str, made: Callable[..., Traits], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return traits under their current names, with a FutureWarning for names of version 0.1.

    Args:
        kind: of the component, for the messages.
        made: the class of the traits of this kind.
        given: keyword arguments of the decorator.
    Raises:
        ComponentError: the kind has no trait of that name.
    """
    known = {one.name for one in fields(made)}  # pyright: ignore[reportArgumentType] - a dataclass
    found = dict[str, Any]()
    for name, value in given.items():
        new = _RENAMED.get(name, name)
        if new in known:
            found[new] = value
            if new != name:
                _warn(f"the trait {name} of @{kind} is now called {new}")
        elif name in _DROPPED:
            _warn(f"the trait {name} of @{kind} has no effect any more: remove it")
        else:
            listed = f"traits of a {kind}: {', '.join(sorted(known))}"
            raise ComponentError(f'@{kind} has no trait "{name}"', did_you_mean(name, sorted(known), listed))
    return found


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)
