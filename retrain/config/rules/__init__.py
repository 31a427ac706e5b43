"""Rules of a configuration whose keys are valid. A new rule is a function in the list of its section."""

from collections.abc import Callable, Iterable, Mapping

from retrain.config.loaded_config import LoadedConfig
from retrain.config.rules import credit_rules as credit
from retrain.config.rules import environment_rules as environments
from retrain.config.rules import section_rules as sections
from retrain.config.schema import Config
from retrain.registry import Finding

Rule = Callable[[Config, LoadedConfig], Iterable[Finding]]
"""Yields errors, or warnings with `fatal=False`, each at the path of a key. Every rule runs, even after errors."""

RULES: Mapping[str, tuple[Rule, ...]] = {
    "model": (sections.model_path, sections.rounding, sections.positions, sections.quantization, sections.extras),
    "logging": (sections.run_folder,),
    "task": (environments.mixture,),
    "environment": (environments.unread_settings, environments.fields, environments.workers, environments.interpreter),
    "rewards": (credit.answers, credit.compared_rewards),
    "rollout": (credit.overlap, credit.continuous),
    "algorithm": (
        sections.replaced,
        credit.contexts,
        credit.corrections,
        credit.continuations,
        credit.decoupled_rewards,
    ),
    "source": (credit.expert_rows, credit.own_rows, credit.stored_rollouts),
    "training": (sections.minibatches, sections.micro_batch, sections.stop_when),
    "distributed": (sections.blocks,),
    "eval": (sections.eval_sets, sections.pass_at, sections.measured),
}
