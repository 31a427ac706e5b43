"""Expert rows of a run: read and tokenized at the start, drawn step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retrain.config.schema import Config
from retrain.data.expert_file import ExpertBuffer, fingerprint
from retrain.engines.capability import positions
from retrain.errors import DataError
from retrain.training.model.loading import Loaded
from retrain.types import ExpertRow, Metrics, Observer, Problem, State


@dataclass
class Experts:
    """Where the expert rows of a step come from.

    Attributes:
        per_step: how many a step trains on.
        buffer: the rows in their order.
        data: hash of what the expert says.
        same_prompts: rows that answer the prompts of the step come first.
    """

    per_step: int
    buffer: ExpertBuffer[ExpertRow]
    data: str
    same_prompts: bool = False

    def draw(self, prompts: Iterable[Sequence[int]]) -> list[ExpertRow]:
        """The rows of a step whose rollouts answer `prompts` (token ids)."""
        return self.buffer.take(self.per_step, map(tuple, prompts) if self.same_prompts else ())

    def metrics(self) -> Metrics:
        """expert/epoch: complete passes over the file."""
        return {"expert/epoch": float(self.buffer.epoch)}

    def state_dict(self) -> State:
        """Where the buffer is."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_dict`."""
        self.buffer.load_state_dict(state)


def build_experts(
    config: Config, model: Loaded, problems: Sequence[Problem], per_step: int, observe: Observer
) -> Experts:
    """Tokenize what the expert says; rows that are longer than the model's context are left out and counted.

    Raises:
        DataError: a row cannot be rendered, or none fits the model.
    """
    settings, limit = config.expert, positions(model.model)
    every = [model.chat.conversation(problem, all_turns=settings.all_assistant_turns) for problem in problems]
    rows = [row for row in every if len(row.ids) <= limit]
    if len(rows) < len(every):
        text = (
            f"{settings.path}: {len(every) - len(rows)} of {len(every)} rows are longer than the model's {limit} tokens"
        )
        if not rows:
            raise DataError(f"{text}; shorten them, or train a model with a longer context")
        observe("message", {"text": f"{text}; they are left out", "level": "warning"})
    keys = [row.prompt_ids for row in rows] if settings.same_prompts else []
    buffer = ExpertBuffer(rows, config.training.seed, keys)
    return Experts(per_step, buffer, fingerprint(problems), settings.same_prompts)
