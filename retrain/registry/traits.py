"""Traits: properties of a component that its decorator declares, one frozen class per kind."""

from __future__ import annotations

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
        problem: description of the problem, see `ConfigProblem`.
        fix: advice, see `ConfigProblem`.
        fatal: True for an error, False for a warning.
        exit_code: exit code of the program for this error, see `ConfigProblem`.
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
        table: TOML table of the component's parameters; None for the table with the component's name.
        extra: (package, extra of retrain) that the component needs.
        check: function that reports contradictions between the parameters and the sections of the
            configuration (such as `config.training.max_tokens`), and user code that cannot be imported.
        check_files: function that checks the files that the component reads; called only if the run uses
            the component.
        when: parameter -> (another parameter, values of the other parameter for which the first is used).
        reaches: parameter -> its effect outside the run, such as on a server. To open a stored run with it
            needs `--trust`.
        metrics: names of the metrics that the component reports -> their meaning.
    """

    table: str | None = None
    extra: tuple[str, str] | None = None
    check: ComponentCheck | None = None
    check_files: ComponentCheck | None = None
    when: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict[str, tuple[str, tuple[Any, ...]]])
    reaches: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class TaskTraits(Traits):
    """Traits of a task.

    Attributes:
        remote: the problems may have to be downloaded, which `retrain validate` does not do.
        settings: default values of section keys, which the run file can override.
        premise: metric -> (lowest, highest) value for which the task can distinguish methods.
        knob: the parameter that controls whether the premise holds.
    """

    remote: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    premise: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    knob: str = ""


@dataclass(frozen=True, kw_only=True)
class SourceTraits(Traits):
    """Traits of a row source.

    Attributes:
        brings: kinds of rows that the source may add: "rollouts" sampled by other weights, for which the update
            corrects, or "expert" rows, on which a loss term with `source="expert"` trains.
        ratio: name of the parameter with the source's share of a step's rows, by which fewer prompts are sampled; ""
            if its rows do not reduce the number of prompts.
        read: (parameter, function) to check a file: the function gets the value of the parameter, reads the file as
            the source itself does, and raises DataError with the first bad rows. `retrain validate` calls it, and a
            run before it loads the model.
    """

    brings: tuple[Literal["rollouts", "expert"], ...] = ("rollouts", "expert")
    ratio: str = ""
    read: tuple[str, Callable[[str], object]] | None = None


@dataclass(frozen=True, kw_only=True)
class RewardTraits(Traits):
    """Traits of a reward.

    Attributes:
        correctness: the score measures correctness. The first such reward that does not return None
            determines the accuracy.
        timeout_s: timeout of a call in seconds; None for the timeout of the pool.
        answers: function from a reference answer to the reason why the reward cannot use it, or "".
        problems: function from the reward's parameters and `Problem.facts` to the reason why the reward cannot score
            completions of the problem, or "".
        parts: function from the reward's parameters to the names and weights of the parts of its score. They replace
            the score in the columns of `reward_parts`. With {} the score is one column.
        pattern: regular expression without which a completion is not paid. Unset: the parameter `pattern`, if any.
    """

    correctness: bool = True
    timeout_s: float | None = None
    answers: Callable[[str], str] | None = None
    problems: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None
    parts: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None
    pattern: str | None = None


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
        exact: the log-probs equal those of the trainer.
        concurrent: the engine can sample during an update, with its own weights and no global random state.
        remote: the engine samples on servers and uses neither the trainer's memory nor its device.
        own_process_group: the engine sets up torch.distributed itself, so multi-rank runs cannot use it.
        adapters: value of the parameter `lora` -> description of how the engine applies LoRA.
        serve_keys: keys of the engine's table that only `retrain serve` reads.
    """

    # False is safe for an engine that declares nothing: the update corrects for it, and `overlap` is refused.
    exact: bool = False
    concurrent: bool = False
    remote: bool = False
    own_process_group: bool = False
    adapters: Mapping[str | None, str] = field(default_factory=dict[str | None, str])
    serve_keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits(Traits):
    """Traits of an advantage.

    Attributes:
        least_rewards: fewest columns of `reward_parts` with which it differs from other advantages.
    """

    least_rewards: int = 1


@dataclass(frozen=True, kw_only=True)
class TransformTraits(Traits):
    """Traits of a transform.

    Attributes:
        writes: the column that it returns.
        correction: it corrects for the difference between the sampler and the trainer.
        drops_only: it is a correction that masks tokens without weighting them, so it can be
            combined with one that weights.
    """

    writes: str = "advantages"
    correction: bool = False
    drops_only: bool = False


@dataclass(frozen=True, kw_only=True)
class LossTraits(Traits):
    """Traits of a loss term.

    Attributes:
        weight: default of the parameter `weight`; a term with weight 0 is not computed.
        source: rows that the term trains on: sampled by the policy, or expert demonstrations.
        vanishes: the term is 0 where advantages are 0.
    """

    weight: float = 1.0
    source: Literal["policy", "expert"] = "policy"
    vanishes: bool = False


@dataclass(frozen=True, kw_only=True)
class SignalTraits(Traits):
    """Traits of a signal.

    Attributes:
        stored: name of the signal's flags in stored rollouts, or of the metric with its value.
        models: models that the signal needs in addition to the current policy, or a function from its
            parameters to them: "frozen" (the initial policy, one copy for all signals), "trained" or
            "averaged" (its own copy of the policy), "policy" (another forward pass of the policy), or the
            path of another model, frozen in bfloat16.
    """

    stored: str = ""
    models: tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]] = ()

    def held(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return `models` for a signal with these parameters."""
        return self.models(params) if callable(self.models) else self.models


@dataclass(frozen=True, kw_only=True)
class ExecutorTraits(Traits):
    """Traits of an executor.

    Attributes:
        local: its runs share the cache of this machine, so that a warm start is computed once, before the runs.
    """

    local: bool = False


def check_names(kind: str, made: Callable[..., Traits], given: Iterable[str]) -> None:
    """Raise ComponentError if a kind has no trait of one of the names.

    Args:
        kind: kind of the component, for the message.
        made: class of the traits of this kind.
        given: names of the keyword arguments of the decorator.
    """
    trait_names = sorted(trait.name for trait in fields(made))  # pyright: ignore[reportArgumentType] - a dataclass
    for name in given:
        if name not in trait_names:
            fix = did_you_mean(name, trait_names, f"traits of a {kind}: {', '.join(trait_names)}")
            raise ComponentError(f'@{kind} has no trait "{name}"', fix)
