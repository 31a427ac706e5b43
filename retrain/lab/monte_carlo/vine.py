"""VinePPO: the credit of a segment is the change of the value over it, estimated from continuations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.algorithms.planning.token_text import TokenText
from retrain.functional.seeds import derive_seed
from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at
from retrain.protocols import StatefulComponent
from retrain.registry import algorithm, signal
from retrain.types import Continue, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@signal("segment_starts", table="vine")
class SegmentStarts(StatefulComponent):
    """First token of every segment, [N, T] bool; the first response token starts a segment.

    Args:
        tokenizer: the model's tokenizer.
        every: length of a segment: "line" ends it with the token that contains a line break, a number after so many
            tokens.
    """

    def __init__(self, tokenizer: Any, *, every: Literal["line"] | Annotated[int, Field(ge=1)] = "line") -> None:
        self._text, self._every = TokenText(tokenizer), every

    def __call__(self, input_ids: Tensor, response_mask: Tensor) -> Tensor:
        """Return [N, T] bool, False outside response_mask."""
        position = response_mask.cumsum(-1) - 1
        if isinstance(self._every, int):
            return response_mask & (position % self._every == 0)
        starts = response_mask & (position == 0)
        for row, (ids, mask) in enumerate(zip(input_ids.cpu(), response_mask.cpu(), strict=True)):
            texts = self._text.pieces(ids[mask].tolist())
            # A token starts a segment if the token before it has the line break.
            starts[row, mask.nonzero()[:, 0][1:]] = starts.new_tensor(["\n" in text for text in texts[:-1]])
        return starts


@signal("segment_values", table="vine", metrics={"vine/tokens": "tokens sampled for continuations"})
class SegmentValues(StatefulComponent):
    """Value of the state before every segment: the mean reward of continuations from there.

    V(s_k) = E[reward | prompt, y before segment k], from `continuations` samples of the policy

    Args:
        continuations: number of samples per distinct prefix; each has random numbers of its own.
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
        """Return values [N, T] at the starts of segments, and the metric vine/tokens, the number of sampled tokens."""
        distinct, numbers = prefixes(input_ids, response_mask, group_ids, segment_starts)
        rewards, tokens = self._continue(problems, distinct, self._count, derive_seed(self._seed, "vine", step))
        return values_at(segment_starts, rewards, numbers), {"vine/tokens": float(tokens)}


@algorithm("vine")
def vine(segment_values: Tensor, segment_starts: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The value after a segment minus the value before it, for all tokens of the segment.

    A_t = V(s_{k+1}) - V(s_k) for token t of segment k,  V after the last segment = the reward

    Args:
        segment_values: [N, T], Monte-Carlo values of the states s_k; segment_starts: [N, T] bool; rewards: [N];
            response_mask: [N, T] bool.
    Returns:
        [N, T] in the unit of the reward. Its gradient is unbiased for any number of continuations. With one segment
        per completion it is REINFORCE with the mean reward of the prompt's continuations as baseline.
    References: Kazemnejad et al., VinePPO, arXiv:2410.01679 (with steps of reasoning as segments and 9 continuations).
    """
    return credit(segment_values, segment_starts, rewards, response_mask)
