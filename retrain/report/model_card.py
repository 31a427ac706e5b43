"""The model card of a saved model: origin, training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.report.page import Table, fill
from retrain.report.run_summary import recipe, task_of
from retrain.report.shown_settings import settings
from retrain.system.model_paths import RANDOM_MODEL, model_location, packaged
from retrain.version import __version__

_CURVE = ("step", "accuracy", "ci_low", "ci_high", "greedy_accuracy", "avg_tokens")
"""Columns of the table of evaluations."""
_POINTS = 12
"""Largest number of rows of that table."""


@dataclass(frozen=True)
class CardFacts:
    """Contents of a model card. It shows only resolved values of the user's file, not its text.

    Attributes:
        name: name of the run.
        config: resolved configuration of the run.
        evaluations: rows of eval.jsonl in order; may be empty.
        steps: steps of RL; 0 if the run consists only of a warm start.
        adapter: True if the directory also has the LoRA adapter in `adapter/`.
        evaluated_in: data type of the matrix products in the evaluations.
        rounded: True if the saved weights are rounded exactly as in the evaluations.
        chat: True if prompts were rendered with the chat template.
    """

    name: str
    config: Mapping[str, Any]
    evaluations: Sequence[Mapping[str, Any]] = ()
    steps: int = 0
    adapter: bool = False
    evaluated_in: str = "float32"
    rounded: bool = False
    chat: bool = False

    @property
    def base(self) -> str:
        """Value of `[model] path`."""
        return self.config["model"]["path"]

    @property
    def task(self) -> str:
        """Name of the task, or names of several tasks."""
        return task_of(self.config)

    @property
    def warmup_steps(self) -> int:
        """Number of supervised steps before RL."""
        return self.config["warmup"]["steps"]

    @property
    def builtin(self) -> bool:
        """True if the weights were initialized at random and trained here, so that no other license applies."""
        return self.base == RANDOM_MODEL

    @property
    def is_local(self) -> bool:
        """True if the base model is a local directory, whose path means nothing on other machines."""
        path = model_location(self.base)
        # `org/name` may be a directory or a name on the hub; transformers takes an existing directory first.
        return not packaged(self.base) and (path.startswith(("/", ".")) or Path(path).is_dir())

    @property
    def origin(self) -> str:
        """Name of the base model: its name on the hub, or the name of its directory.

        For a packaged model it is the hub's name of the original.
        """
        model = packaged(self.base)
        return (Path(self.base).name if self.is_local else self.base) if model is None else model.hub_name

    @property
    def precision(self) -> str:
        """Sentences about the precision of the evaluations, and what it means for the saved weights."""
        if self.evaluated_in == "float32":
            return "Evaluated in float32."
        if self.rounded:
            return f"Evaluated in {self.evaluated_in} with exactly these weights."
        if self.adapter:
            return (
                f"Evaluated in {self.evaluated_in}, with base and adapter rounded separately; here the adapter is "
                "merged into the base in the base's stored precision."
            )
        return (
            f"Evaluated in {self.evaluated_in} with rounded weights; these weights are exact, and their answers may "
            f"differ. `retrain export RUN DIRECTORY --dtype {self.evaluated_in}` writes the rounded weights."
        )

    @property
    def license(self) -> str:
        """License of the weights, by its identifier on the hub."""
        model = packaged(self.base)
        # Of other models this package does not know the license, and "other" claims nothing.
        return "apache-2.0" if self.builtin else "other" if model is None else model.license

    @property
    def made_here(self) -> bool:
        """True if RL started from weights that exist only in this run: random ones, or those of its warm start."""
        return self.builtin or self.warmup_steps > 0

    @property
    def summary(self) -> str:
        """Sentence with the base model, the training and the task."""
        ways = [f"{self.warmup_steps} supervised steps"] if self.warmup_steps else []
        ways += [f"{self.steps} steps of reinforcement learning"] if self.steps else []
        made = "trained with " + " and ".join(ways) if ways else "not trained further"
        model = packaged(self.base)
        lost = "" if model is None else f" ({model.precision})"
        return f"`{self.origin}`{lost}, {made} on the task `{self.task}` by retrain {__version__}."


def write_card(directory: Path, card: CardFacts) -> Path:
    """Write the card to `directory/README.md`, where tools and the hub expect it, and return that path."""
    path = directory / "README.md"
    path.write_text(render_card(card), encoding="utf-8")
    return path


def render_card(card: CardFacts) -> str:
    """Render the card as Markdown with YAML front matter. Configuration values that look secret are masked."""
    data = {
        "license": card.license,
        "base_model": None if card.builtin or card.is_local else card.origin,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["retrain", *(["reinforcement-learning"] if card.steps else []), card.task],
    }
    return fill(
        "model_card.md",
        front_matter=_yaml(data),
        card=card,
        last=card.evaluations[-1] if card.evaluations else None,
        curve=_curve(card.evaluations),
        sets=_sets(card.evaluations),
        recipe=recipe(card.config),
        settings=settings(card.config),
    )


def render_adapter_card(card: CardFacts, base: str) -> str:
    """Render the card of the adapter as Markdown.

    Args:
        card: contents of the model card.
        base: the adapter's base model; a path such as "../base" is relative to the adapter.
    """
    # A base beside the adapter was saved with it; the hub cannot link to it.
    shipped = base.startswith("..")
    origin = None if shipped or card.is_local else card.origin if packaged(card.base) else base
    data = {"library_name": "peft", "base_model": origin, "tags": ["retrain", "lora"]}
    return fill("adapter_card.md", front_matter=_yaml(data), card=card, base=base, shipped=shipped)


def _yaml(data: Mapping[str, Any]) -> str:
    """Return the front matter in the hub's format, without values that are None."""
    from huggingface_hub import ModelCardData

    return ModelCardData(**data).to_yaml()


def _curve(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of at most twelve evaluations, including the first and the last."""
    count = min(_POINTS, len(rows))
    # Equal distances that include both ends; max() is for a single evaluation.
    chosen = [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]
    columns = [name for name in _CURVE if any(name in row for row in rows)]
    return Table(columns, [[_number(row.get(name)) for name in columns] for row in chosen])


def _sets(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the last evaluation of each named set of held-out problems; without rows if there is none."""
    last = evaluations[-1] if evaluations else {}
    names = [key.removesuffix("/accuracy") for key in last if key.endswith("/accuracy")]
    figures = dict.fromkeys(key.partition("/")[2] for key in last if key.partition("/")[0] in names)
    columns = [key for key in figures if key in (*_CURVE, "problems") or key.startswith(("avg@", "pass@"))]
    rows = [[name, *(_number(last.get(f"{name}/{column}")) for column in columns)] for name in names]
    return Table(["set", *columns], rows)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
