"""HICRA for TRL, with the parameter names and defaults of its documentation.

from retrain.adapters import HICRAConfig, HICRATrainer
trainer = HICRATrainer(model=..., reward_funcs=..., args=HICRAConfig(hicra_alpha=0.2), train_dataset=...)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from retrain.adapters.token_credit import Tables, load_credit
from retrain.adapters.trl import AdvantageMixin

_trl: Any = importlib.import_module("trl")


@dataclass
class HICRAConfig(_trl.GRPOConfig):
    """GRPOConfig with the parameters of HICRA, which are also options of the command line: `--hicra_alpha 0.3`.

    `sg_n_range` is used only to extract grams (`retrain grams extract --n-min 3 --n-max 5`), not for training.
    """

    hicra_alpha: float = field(default=0.2, metadata={"help": "Amplification of selected tokens, in [0, 1]."})
    use_hicra: bool = field(default=True, metadata={"help": "False trains exactly as GRPOTrainer does."})
    hicra_entropy_topk: float = field(
        default=0.3, metadata={"help": "Share of a completion's tokens that count as high entropy."}
    )
    use_planning_tokens: bool = field(
        default=False, metadata={"help": "Also amplify tokens of strategic grams, in every completion."}
    )
    strategic_grams_path: str | None = field(default=None, metadata={"help": "JSON file with strategic grams."})
    strategic_grams: list[str] | None = field(
        default=None, metadata={"help": "Strategic grams. If neither this nor a path is set: the list for mathematics."}
    )
    sg_n_range: tuple[int, int] = field(
        default=(3, 5), metadata={"help": "Number of words of a gram in extraction; not used for training."}
    )
    log_semantic_entropy: bool = field(default=True, metadata={"help": "Log hicra/semantic_entropy."})
    log_planning_token_ratio: bool = field(default=True, metadata={"help": "Log hicra/planning_token_ratio."})

    def tables(self) -> Tables:
        """Return the tables `[hicra]` and `[planning]` for these parameters."""
        # The default of HICRA's documentation for TRL; that of this package is another list.
        grams = "math" if self.strategic_grams is None and self.strategic_grams_path is None else self.strategic_grams
        planning = {
            "strategic_grams": grams,
            "strategic_grams_path": self.strategic_grams_path,
            "log_semantic_entropy": self.log_semantic_entropy,
            "log_planning_token_ratio": self.log_planning_token_ratio,
        }
        hicra = {"alpha": self.hicra_alpha, "entropy_topk": self.hicra_entropy_topk}
        return {
            "hicra": {**hicra, "use_planning_tokens": self.use_planning_tokens},
            "planning": {name: value for name, value in planning.items() if value is not None},
        }


_NAMES = {
    ("hicra", "alpha"): "hicra_alpha",
    ("hicra", "entropy_topk"): "hicra_entropy_topk",
    ("hicra", "use_planning_tokens"): "use_planning_tokens",
    ("planning", "strategic_grams"): "strategic_grams",
    ("planning", "strategic_grams_path"): "strategic_grams_path",
}
"""Key -> the argument of HICRAConfig that sets it, which messages name."""


class HICRATrainer(AdvantageMixin, _trl.GRPOTrainer):
    """GRPOTrainer that applies the transform `hicra_entropy` to TRL's advantages.

    The arguments are those of GRPOTrainer; `args` is a HICRAConfig.

    Raises:
        TypeError: `args` is not a HICRAConfig.
        ConfigError: a parameter of HICRA out of range, or unusable strategic grams.
    """

    retrain_mode = None
    retrain_transform = "hicra_entropy"

    def __init__(self, model: Any, reward_funcs: Any = None, args: HICRAConfig | None = None, **others: Any) -> None:
        args = HICRAConfig() if args is None else args
        if not isinstance(args, HICRAConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"args is a {type(args).__name__}; HICRATrainer takes a HICRAConfig")
        self.retrain_tables = args.tables()
        self._use_hicra = args.use_hicra
        # Before the model is loaded, which may take minutes.
        load_credit(None, {}, self.retrain_transform, self.retrain_tables, ("HICRAConfig", _NAMES))
        trainer: Any = super()
        trainer.__init__(model=model, reward_funcs=reward_funcs, args=args, **others)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch, with amplified advantages unless `use_hicra` is False."""
        if self._use_hicra:
            return super()._generate_and_score_completions(inputs)
        # Past the mixin, to GRPOTrainer itself.
        trainer: Any = super(AdvantageMixin, self)
        return trainer._generate_and_score_completions(inputs)
