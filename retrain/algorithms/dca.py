"""Decoupled Conditional Advantage (DCA): separate credit for accuracy and, among correct answers, for brevity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.advantages.group_baselines import grpo_std, rloo
from retrain.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor

# The deviation of equal lengths is 0, and a sigmoid is flat beyond 20.
_EPS = 1e-8
_Z_LIMIT = 20.0

Unit = Literal["tokens", "turns"]


@advantage("dca")
@advantage("dca_grpo", table="dca")
def dca(  # noqa: PLR0913 - four columns and three keys
    correct: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    turn_ids: Tensor,
    *,
    beta: Annotated[float, Field(ge=0)] = 0.2,
    dynamic: bool = False,
    length: Unit = "tokens",
) -> Tensor:
    """Accuracy advantage plus a length advantage among the correct completions.

    A_i = A_acc + beta * A_len,  A_acc = (c_i - mean c) / (sd(c) + 1e-8),  A_len = -(s_i - mean_S s) for i in S, else 0,
    s_i = sigmoid(clip((l_i - mean_S l) / (sd_S(l) + 1e-8), -20, 20)),  c_i = 1 for a correct completion, else 0,
    S = correct completions of the group

    Args:
        correct: [N] bool; lengths: [N] tokens; group_ids: [N] int; turn_ids: [N, T] int, from 0.
        beta: weight of brevity; with 0.2 every correct answer ranks above the wrong ones of its group.
        dynamic: multiply A_len by the group's success rate n/G, so that answers to hard prompts may stay long.
        length: unit of l: sampled "tokens", or "turns" of an episode, each of which is a tool call.
    Returns:
        [N] without unit, float64. A_len sums to 0 over S, and is 0 where S has one member or equal lengths. Rows of an
        all-correct group with different lengths have an advantage. Rewards have an effect through `correct` only.
    References: Peng et al., Think Dense, Not Long, arXiv:2602.02099.
    """
    scores = length_scores(correct, _measured(length, lengths, turn_ids), group_ids)
    brevity = F.groups.group_mean(scores, group_ids, correct) - scores
    return grpo_std(correct.double(), group_ids) + beta * _scaled(brevity, correct, group_ids, dynamic)


@advantage("dca_rloo", table="dca")
def dca_rloo(  # noqa: PLR0913 - four columns and three keys
    correct: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    turn_ids: Tensor,
    *,
    beta: Annotated[float, Field(ge=0)] = 0.2,
    dynamic: bool = False,
    length: Unit = "tokens",
) -> Tensor:
    """DCA with leave-one-out baselines.

    A_i = A_acc + beta * A_len,  A_acc = c_i - mean_{j != i} c_j,
    A_len = -(s_i - mean_{S without i} s) for i in S, else 0

    Args:
        correct, lengths, group_ids, turn_ids, beta, dynamic, length: see `dca`, also for c, s and S.
    Returns:
        [N] float64. A_len is n/(n-1) times that of `dca` with n the size of S, and 0 where S has one member. The
        advantage is 0 in a group of one.
    References: Peng et al., Think Dense, Not Long, arXiv:2602.02099; Ahmadian et al., Back to Basics,
        arXiv:2402.14740.
    """
    scores = length_scores(correct, _measured(length, lengths, turn_ids), group_ids)
    brevity = -F.groups.leave_one_out(scores, group_ids, correct)
    return rloo(correct.double(), group_ids) + beta * _scaled(brevity, correct, group_ids, dynamic)


def _measured(unit: Unit, lengths: Tensor, turn_ids: Tensor) -> Tensor:
    # Turns are numbered from 0, so the last number is one less than their count.
    return lengths if unit == "tokens" else turn_ids.amax(-1) + 1


def length_scores(correct: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Length score s of each row, in (0, 1), larger for longer rows.

    s_i = sigmoid(clip((l_i - mean_S l) / (sd_S(l) + 1e-8), -20, 20)), S = correct rows of the group

    Args:
        correct: [N] bool; lengths: [N]; group_ids: [N] int.
    Returns:
        [N] float64; 0.5 in a group whose correct rows have equal lengths.
    References: Peng et al., Think Dense, Not Long, arXiv:2602.02099.
    """
    tokens = lengths.double()
    spread = F.groups.group_std(tokens, group_ids, correct)
    z = (tokens - F.groups.group_mean(tokens, group_ids, correct)) / (spread + _EPS)
    # Equal lengths have no spread, and rounding divided by 1e-8 would be a score.
    return z.where(spread >= _EPS, 0.0).clamp(-_Z_LIMIT, _Z_LIMIT).sigmoid()


def _scaled(brevity: Tensor, correct: Tensor, group_ids: Tensor, dynamic: bool) -> Tensor:
    # Statistics of the correct rows mean nothing on wrong ones: brevity is no merit of a wrong answer.
    brevity = brevity.where(correct, 0.0)
    if not dynamic:
        return brevity
    return brevity * F.groups.group_size(group_ids, correct) / F.groups.group_size(group_ids)
