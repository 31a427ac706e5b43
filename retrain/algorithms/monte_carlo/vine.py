"""VinePPO: the credit of a segment is what it changed, by values from continuations at its borders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.algorithms.monte_carlo.prefixes import Continue, credit, prefixes, values_at
from retrain.algorithms.planning.token_text import TokenText
from retrain.functional.seeds import derive_seed
from retrain.protocols import StatefulComponent
from retrain.registry import algorithm, signal
from retrain.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor


@signal("segment_starts", table="vine")
class SegmentStarts(StatefulComponent):
    """Where the segments of a response begin: [N, T] bool; the first response token begins one.

    Args:
        tokenizer: the model's.
        every: a segment is a "line" (it ends with the token that ends the line), or so many tokens.
    """

    def __init__(self, tokenizer: Any, *, every: Literal["line"] | Annotated[int, Field(ge=1)] = "line") -> None:
        self._text, self._every = TokenText(tokenizer), every

    def __call__(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """[N, T] bool."""
        place = response_mask.cumsum(-1) - 1
        if isinstance(self._every, int):
            return response_mask & (place % self._every == 0)
        starts = response_mask & (place == 0)
        for row, (ids, mask) in enumerate(zip(input_ids.cpu(), response_mask.cpu(), strict=True)):
            texts = self._text.pieces(ids[mask].tolist())
            starts[row, mask.nonzero()[:, 0][1:]] = starts.new_tensor(["\n" in text for text in texts[:-1]])
        return starts


@signal("segment_values", table="vine")
class SegmentValues(StatefulComponent):
    """Value of the state before every segment: the mean reward of completions that are continued from there.

    Args:
        continuations: of every different beginning; they draw from streams of their own.
    """

    def __init__(self, continue_from: Continue, seed: int, *, continuations: Annotated[int, Field(ge=1)] = 9) -> None:
        self._continue, self._seed, self._count = continue_from, seed, continuations

    def __call__(
        self,
        problems: Any,
        input_ids: Tensor,
        response_mask: Tensor,
        group_ids: Tensor,
        segment_starts: Tensor,
        step: int,
    ) -> tuple[Tensor, Metrics]:
        """[N, T], read where segments start, and vine/tokens: what the continuations sampled."""
        found, numbers = prefixes(input_ids, response_mask, group_ids, segment_starts)
        rewards, tokens = self._continue(problems, found, self._count, derive_seed(self._seed, "vine", step))
        return values_at(segment_starts, rewards, numbers), {"vine/tokens": float(tokens)}


@algorithm("vine")
def vine(segment_values: Tensor, segment_starts: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The value behind a segment less the value before it, for all of its tokens.

    A_t = V(s_{k+1}) - V(s_k) for token t of segment k,  V behind the last segment = the reward

    Args:
        segment_values: [N, T], Monte-Carlo values of the states s_k; segment_starts: [N, T] bool; rewards: [N];
            response_mask: [N, T] bool.
    Returns:
        [N, T] in the unit of the reward; without bias, however few the continuations. One segment is REINFORCE with
        a baseline of the prompt's other completions.
    References: Kazemnejad et al., VinePPO, arXiv:2410.01679 (there a segment is a step of reasoning, and K = 9).
    """
    return credit(segment_values, segment_starts, rewards, response_mask)
