"""Credit per token for the rollouts of another trainer, by the pipeline that runs of this package have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.document import Document
from retrain.config.load import validate
from retrain.config.rules.unread_keys import judged
from retrain.errors import ConfigError
from retrain.registry import bind, find, is_dotted
from retrain.types import Batch, Metrics

if TYPE_CHECKING:
    from retrain.config.resolve import LoadedConfig

Tables = Mapping[str, Mapping[str, Any]]
"""Tables of the configuration by name: {"gtpo": {"beta": 0.3}, "planning": {"strategic_grams": "math"}}."""


def load_credit(
    mode: str | None, params: Mapping[str, Any], transform: str | Sequence[str] = "none", tables: Tables | None = None
) -> LoadedConfig:
    """Check the settings of credit as those of a run are checked.

    Args:
        mode: as `[algorithm] advantage_mode`; None where the other trainer computes the episode's advantage.
        params: of the mode.
        transform: as `[algorithm] transform_mode`.
        tables: parameters of transforms and signals.
    Raises:
        ConfigError: every mistake. ComponentError: the mode does not exist.
    """
    data: dict[str, Any] = {name: dict(table) for name, table in (tables or {}).items()}
    algorithm = data.setdefault("algorithm", {})
    algorithm["transform_mode"] = transform if isinstance(transform, str) else list(transform)
    if mode is not None:
        algorithm["advantage_mode"] = mode
        table = algorithm.setdefault("advantage_params", {}) if is_dotted(mode) else {}
        if not is_dotted(mode) and params:
            table = data.setdefault(find("advantage", mode).table, {})
        table.update(params)
    loaded = validate(Document("retrain.adapters", data=data))
    mistakes, _ = judged(loaded.unread.items(), overridden=False)
    if mistakes:
        raise ConfigError(mistakes)
    return loaded


class TokenCredit:
    """Credit of batches of rollouts; signals such as SEPA's schedule keep their state between batches.

    Args:
        loaded: of `load_credit`.
        resources: parts of the trainer that components ask for by name: `tokenizer`, `total_steps` ...
        has_advantages: batches come with the episode's advantage in `advantages`, and no advantage is computed.
    Raises:
        ComponentError: a component needs a part that the trainer does not have, such as the policy of PRIME.
    """

    def __init__(self, loaded: LoadedConfig, resources: Mapping[str, Any], has_advantages: bool = False) -> None:
        stages = replace(loaded.components.stages(), filter=bind("filter", "none"))
        if has_advantages:
            stages = replace(stages, advantage=None)
        self._pipeline = Pipeline.resolve(stages, loaded.components.signal)
        self._pipeline.build({**loaded.resources, **resources})

    @property
    def policy_columns(self) -> frozenset[str]:
        """Columns of the policy's forward that batches need: old_logprobs, entropy, ..."""
        return self._pipeline.policy_columns

    def __call__(self, batch: Batch, learns: bool = True) -> tuple[Batch, Metrics]:
        """The batch with advantages [N, T] and the columns of signals, and the metrics.

        Args:
            learns: the batch is trained on; otherwise no signal changes its state.
        """
        metrics = self._pipeline.before(batch) if learns else {}
        credited, found = self._pipeline.credit(batch)
        metrics |= found
        return credited, metrics | self._pipeline.after(credited) if learns else metrics
