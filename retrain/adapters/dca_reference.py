"""DCA as functions on plain arrays, with the names of its reference implementation.

    from retrain.dca import advantage_dca_grpo, aes_score
    advantage_dca_grpo([True, True, False, True], [100, 200, 150, 400], beta=0.2)

The results equal those of `[algorithm] advantage_mode = "dca"`: Peng et al., Think Dense, Not Long,
arXiv:2602.02099. Arrays are lists, numpy arrays or tensors; results are tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.adapters.core import compute_advantage as compute_advantage
from retrain.functional.evaluation import aes as _aes
from retrain.functional.evaluation import pass_at_k as pass_at_k
from retrain.rewards.boxed_math import simple_equal as is_equivalent_math

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "advantage_dca_grpo",
    "advantage_dca_rloo",
    "aes_score",
    "compute_accuracy",
    "compute_advantage",
    "compute_advantage_for_slime",
    "compute_avg_tokens",
    "is_equivalent_math",
    "length_score_z_sigmoid",
    "pass_at_k",
    "reward_for_slime",
    "reward_for_verl",
    "rewards_coupled_lp",
]


_REWARD_MODES = ("vanilla", "grpo_lp", "dca", "dca_grpo", "dca_rloo")


def advantage_dca_grpo(
    correct_mask: Sequence[bool] | Tensor,
    lengths: Sequence[int] | Tensor,
    beta: float = 0.2,
    *,
    use_dynamic: bool = False,
) -> Tensor:
    """DCA with normalised accuracy, for the completions of one prompt.

    A = A_acc + beta * A_len; see the advantage `dca` for both terms

    Args:
        correct_mask: [G] booleans, true for correct completions.
        lengths: [G] numbers of response tokens.
        beta: weight of brevity.
        use_dynamic: scale beta by the share of correct completions.
    Returns:
        [G] float32, without unit.
    Raises:
        ValueError: the arrays differ in length, are not flat, or have values that are not finite.
    """
    return _advantage("dca", correct_mask, lengths, beta=beta, dynamic=use_dynamic)


def advantage_dca_rloo(
    correct_mask: Sequence[bool] | Tensor,
    lengths: Sequence[int] | Tensor,
    beta: float = 0.2,
    *,
    use_dynamic: bool = False,
) -> Tensor:
    """DCA with leave-one-out baselines, for the completions of one prompt.

    Arguments, result and errors are those of `advantage_dca_grpo`. A group of one gets 0.
    """
    return _advantage("dca_rloo", correct_mask, lengths, beta=beta, dynamic=use_dynamic)


def length_score_z_sigmoid(correct_mask: Sequence[bool] | Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """Length score of the correct completions of one prompt, larger for longer ones.

    s_i = sigmoid(clip((l_i - mean_S l) / (sd_S(l) + 1e-8), -20, 20)),  S = correct completions

    Args:
        correct_mask: [G] booleans, true for correct completions.
        lengths: [G] numbers of response tokens.
    Returns:
        [G] float64 in (0, 1); 0 for wrong completions, 0.5 if all lengths in S are equal.
    """
    import torch

    from retrain.algorithms.dca import length_scores

    correct = torch.as_tensor(correct_mask).bool()
    tokens = torch.as_tensor(lengths)
    group = torch.zeros(len(correct), dtype=torch.long, device=correct.device)
    return length_scores(correct, tokens, group).where(correct, 0.0)


def rewards_coupled_lp(
    correct_mask: Sequence[bool] | Tensor, lengths: Sequence[int] | Tensor, gamma: float = 1e-3
) -> Tensor:
    """Reward with a length penalty, the coupled baseline to which DCA is compared.

    r_i = 1 - gamma * l_i if correct, else 0

    Args:
        correct_mask: [N] booleans, true for correct completions.
        lengths: [N] numbers of response tokens.
        gamma: penalty per token.
    Returns:
        [N] float64.
    Raises:
        ValueError: the lengths are not N numbers of tokens.
    References: Arora and Zanette, arXiv:2502.04463.
    """
    import torch

    correct = torch.as_tensor(correct_mask).bool()
    tokens = torch.as_tensor(lengths).double()
    if tokens.shape != correct.shape or not bool(((tokens >= 0) & tokens.isfinite()).all()):
        raise ValueError(f"lengths are not {len(correct)} numbers of tokens")
    return (1 - gamma * tokens).where(correct, 0.0)


def compute_advantage_for_slime(  # noqa: PLR0913 - the documented call, every option by name
    batch: Mapping[str, Any],
    *,
    adv_mode: str = "vanilla",
    beta: float = 0.2,
    gamma: float = 1e-3,
    use_rloo: bool = False,
    use_dynamic: bool = True,
    reward_key: str = "rewards",
    length_key: str = "response_lengths",
    correct_key: str | None = None,
    group_size: int | None = None,
) -> Tensor:
    """Compute the advantages of a batch of complete groups with contiguous members.

    The hook for slime itself is `retrain.adapters.slime.compute_advantage_for_slime`.

    Args:
        batch: name -> array [N].
        adv_mode: "vanilla", "grpo_lp", "dca" or any registered advantage.
        beta: parameter of DCA.
        gamma: parameter of "grpo_lp".
        use_rloo: use leave-one-out baselines for "dca".
        use_dynamic: multiply DCA's length term by the share of correct completions of the group, as the reference
            implementation does by default; False: the formula as printed.
        reward_key: name of the array of rewards.
        length_key: name of the array with the numbers of response tokens.
        correct_key: name of an array of booleans; by default a reward above 0.5 is correct.
        group_size: number of completions per prompt; by default the batch is one group.
    Returns:
        [N] in the precision of the rewards (float32 for lists).
    Raises:
        KeyError: the batch lacks an array.
        ValueError: group_size is not positive, or N is not a multiple of it.
    """
    rewards = batch[reward_key]
    count = len(rewards)
    size = count if group_size is None else group_size
    if size < min(count, 1) or (count and count % size):
        raise ValueError(f"{count} completions cannot be divided into groups of {size}; set group_size")
    mode, params = _settings(adv_mode, beta, gamma, use_rloo=use_rloo, use_dynamic=use_dynamic)
    return compute_advantage(
        rewards,
        batch[length_key],
        [index // size for index in range(count)],
        mode,
        correct=batch[correct_key] if correct_key else None,
        **params,
    )


def reward_for_verl(
    correct: Sequence[bool] | Tensor, lengths: Sequence[int] | Tensor, mode: str = "vanilla", gamma: float = 1e-3
) -> Tensor:
    """Reward of each completion: 1 or 0, with a length penalty in mode "grpo_lp".

    The hook for verl itself is `retrain.adapters.verl.reward_for_verl`.

    Args:
        correct: [N] booleans, true for correct completions.
        lengths: [N] numbers of response tokens.
        mode: "grpo_lp" subtracts the penalty; in "vanilla" and "dca" the reward ignores the length.
        gamma: penalty per token.
    Returns:
        [N] float64.
    Raises:
        ValueError: `mode` is unknown, or the lengths are not N numbers of tokens.
    """
    if mode not in _REWARD_MODES:
        raise ValueError(f"there is no mode {mode!r}; use one of {', '.join(_REWARD_MODES)}")
    return rewards_coupled_lp(correct, lengths, gamma if mode == "grpo_lp" else 0.0)


reward_for_slime = reward_for_verl
"""The reward is the same for both trainers."""


def compute_accuracy(correct: Sequence[Sequence[bool]]) -> float:
    """pass@1: share of problems whose first completion is correct; 0 if there are no problems."""
    # A problem without completions is not solved, and still counts.
    return sum(len(row) > 0 and bool(row[0]) for row in correct) / len(correct) if len(correct) else 0.0


def compute_avg_tokens(lengths: Sequence[Sequence[int] | int]) -> float:
    """Mean number of tokens over all completions of all problems; 0 if there are no completions."""
    flat = [n for row in lengths for n in (row if isinstance(row, Iterable) else [row])]
    return float(sum(flat)) / len(flat) if flat else 0.0


def aes_score(accuracy: float, base_accuracy: float, avg_tokens: float, base_avg_tokens: float) -> float:
    """Accuracy-efficiency score of a run against a baseline.

    (Lb - L) / Lb + 3 (p - pb) / pb if p >= pb, else (Lb - L) / Lb - 5 (pb - p) / pb

    A term is 0 if the value of its baseline is 0.

    Args:
        accuracy: p, pass@1 in [0, 1].
        base_accuracy: pb, pass@1 of the baseline.
        avg_tokens: L, mean number of tokens per completion.
        base_avg_tokens: Lb, mean number of tokens per completion of the baseline.
    """
    return _aes(accuracy, base_accuracy, avg_tokens, base_avg_tokens)[0]


def _settings(mode: str, beta: float, gamma: float, *, use_rloo: bool, use_dynamic: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of a registered advantage and its parameters."""
    if mode in {"dca", "dca_grpo", "dca_rloo"}:
        name = "dca_rloo" if use_rloo or mode == "dca_rloo" else "dca"
        return name, {"beta": beta, "dynamic": use_dynamic}
    return mode, {"gamma": gamma} if mode == "grpo_lp" else {}


def _advantage(mode: str, correct: Sequence[bool] | Tensor, lengths: Sequence[int] | Tensor, **params: Any) -> Tensor:
    return compute_advantage(correct, lengths, mode=mode, **params)
