"""Token-level advantages for the rollouts of another trainer, computed by the pipeline of this package's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.config.document import Document, Place
from retrain.config.load import validate
from retrain.config.positions import KeyPath
from retrain.config.rules.unread_keys import judged
from retrain.errors import ConfigError
from retrain.registry import bind, find, is_dotted
from retrain.types import Batch, Metrics

if TYPE_CHECKING:
    from retrain.config.loaded_config import LoadedConfig

Tables = Mapping[str, Mapping[str, Any]]
"""Name -> table of the configuration: {"gtpo": {"beta": 0.3}, "planning": {"strategic_grams": "math"}}."""


def load_credit(
    mode: str | None,
    params: Mapping[str, Any],
    transform: str | Sequence[str] = "none",
    tables: Tables | None = None,
    arguments: tuple[str, Mapping[tuple[str, str], str]] = ("retrain.adapters", {}),
) -> LoadedConfig:
    """Validate the settings of advantages as in the configuration of a run.

    Args:
        mode: see `[algorithm] advantage_mode`; None if the other trainer computes the episode advantages.
        params: parameters of the mode.
        transform: see `[algorithm] transform_mode`.
        tables: parameters of transforms and signals.
        arguments: name of the caller, and key -> the caller's argument that sets it, for messages.
    Raises:
        ConfigError: a setting is invalid or unused; the error lists all of them.
        ComponentError: the mode does not exist.
    """
    data: dict[str, Any] = {name: dict(table) for name, table in (tables or {}).items()}
    algorithm = data.setdefault("algorithm", {})
    algorithm["transform_mode"] = transform if isinstance(transform, str) else list(transform)
    if mode is not None:
        algorithm["advantage_mode"] = mode
        # A plug-in has no table of its own.
        table = algorithm.setdefault("advantage_params", {}) if is_dotted(mode) else {}
        if not is_dotted(mode) and params:
            table = data.setdefault(find("advantage", mode).table, {})
        table.update(params)
    # Messages name the caller's argument, because there is no file with lines.
    source, names = arguments
    places: dict[KeyPath, Place] = {(table,): Place(source, 0, 0, (table,)) for table in data}
    places |= {key: Place(source, 0, 0, (name,)) for key, name in names.items()}
    loaded = validate(Document(source, data=data, places=places))
    # A parameter that nothing reads is a mistake, as it is in a run's file.
    mistakes, _ = judged(loaded.unread.items(), overridden=False)
    if mistakes:
        raise ConfigError(mistakes)
    return loaded


class TokenCredit:
    """Compute the token-level advantages of batches. Signals, such as SEPA's schedule, keep state between batches.

    Args:
        loaded: the result of `load_credit`.
        resources: name -> part of the trainer that components may need: `tokenizer`, `total_steps` ...
        has_advantages: batches already have episode advantages in `advantages`, so that none are computed.
    Raises:
        ComponentError: a component needs a part that the trainer does not have, such as the policy for PRIME.
    """

    def __init__(self, loaded: LoadedConfig, resources: Mapping[str, Any], has_advantages: bool = False) -> None:
        # The trainer decides which completions it trains on.
        credit = [stage for stage in loaded.credit if not (has_advantages and stage.kind == "advantage")]
        self._pipeline = loaded.pipeline_of(credit=credit, group_filter=bind("filter", "none"))
        self._pipeline.build({**loaded.resources, **resources})

    @property
    def policy_columns(self) -> frozenset[str]:
        """Columns that batches must have from a forward pass of the policy: old_logprobs, entropy, ..."""
        return self._pipeline.policy_columns

    def __call__(self, batch: Batch, learns: bool = True) -> tuple[Batch, Metrics]:
        """Compute advantages.

        Args:
            batch: the rollouts.
            learns: the batch is trained on. If False, signals do not change their state.
        Returns:
            The batch with advantages [N, T] and the columns of signals, and metrics.
        """
        metrics = self._pipeline.before(batch) if learns else {}
        credited, credit_metrics = self._pipeline.credit(batch)
        metrics |= credit_metrics
        return credited, metrics | self._pipeline.after(credited) if learns else metrics
