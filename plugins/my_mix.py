"""MIX of Trinity-RFT (arXiv:2505.17826) as a plug-in: a sampling strategy and a loss term of your own."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import ExpertRow, Problem, Rollout, loss, source

if TYPE_CHECKING:
    from torch import Tensor

Ratio = Annotated[float, Field(gt=0, lt=1)]


@source("my_mix", brings=("expert",), ratio="expert_data_ratio")
class MixSampleStrategy:
    """Adds rows of a file to every step, in the order of the file, again and again."""

    def __init__(self, chat: Any, row_count: int, *, path: str, expert_data_ratio: Ratio = 0.5) -> None:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        self.rows = [expert_row(chat, f"{path}:{number}", line) for number, line in enumerate(lines, 1)]
        self.count, self.used = row_count, 0

    def take(self, step: int, rollouts: list[Rollout]) -> tuple[list[Any], dict[str, float]]:
        expert = [self.rows[(self.used + index) % len(self.rows)] for index in range(self.count)]
        self.used += self.count
        return [*rollouts, *expert], {"my_mix/passes": self.used / len(self.rows)}

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


def expert_row(chat: Any, place: str, line: str) -> ExpertRow:
    """Tokenize a line of the file as a prompt and the answer to imitate."""
    *prompt, answer = json.loads(line)["messages"]
    return chat.conversation(Problem(place, prompt, answer="", solution=answer["content"]))


@loss("my_sft", source="expert")
def my_sft(logprobs: "Tensor", response_mask: "Tensor") -> "Tensor":
    """Minus the log-likelihood of the expert's tokens; rows of the policy do not reach it."""
    return -logprobs.where(response_mask, 0.0)
