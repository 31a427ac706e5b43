"""Implicit process reward model that is trained in the run. Importing this imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.graph.objective import Objective
from retrain.registry import Component, Finding, find, signal
from retrain.training.auxiliary.second_model import check_path, own_optimizer, trained_second_model
from retrain.training.reference import ScoringSignal, check_start, fingerprint
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.training.policy import TorchPolicy

_Positive = Annotated[float, Field(gt=0)]
FACTS = "prm.json"
"""File of an exported model with beta, temperature and number of optimizer steps, on which its scores depend."""
REFERENCE = "reference"
"""Folder of an exported model with its reference model."""


_LEARNS = ("update", ("after", "before"))


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Find a reward model that can only return 0, or that does not exist."""
    path: str | None = params["path"]
    if path is None and params["update"] == "none" and params["reference"] == "frozen":
        problem = "a process reward model that equals its reference and is not trained gives reward 0 to every token"
        yield Finding(("update",), problem, 'set update = "after", or name a trained model in [prime] path')
    yield from check_path(path, config, "process reward model")


@signal(
    "process_rewards",
    table="prime",
    check=_check,
    models=("trained", "frozen"),
    when={"lr": _LEARNS, "max_grad_norm": _LEARNS},
)
class ProcessRewards(ScoringSignal):
    """Process reward of each response token, from an implicit reward model phi.

    r_t = beta * (log phi(y_t) - log ref(y_t)), [N, T], 0 outside response_mask

    phi is a language model that starts as the initial policy. It is trained on outcomes alone, so that
    r_phi(y) = sum_t r_t becomes the log-odds of a correct answer. Its loss is a mean over the policy's rows:

    ce   -log sigmoid(r_phi) on correct rows, -log sigmoid(-r_phi) on wrong rows
    dpo  -log sigmoid(+-(r_phi - m)), + on correct rows; m, without gradient, is the mean r_phi of the group's rows of
         the other correctness. Rows of a group without such rows are left out.

    Log-probs of phi and ref are taken at the sampling temperature. With LoRA phi is a second adapter on the policy's
    base model, and the frozen reference is the base model without adapter. Expert rows do not train phi.

    Args:
        beta: scale of the rewards.
        lr, max_grad_norm: learning rate and gradient clipping of phi's optimizer, AdamW without weight decay at a
            constant rate.
        update: "after" trains phi after the policy's update, so that the rewards of a batch come from a phi that was
            not trained on it; "before" trains phi first, so that they come from a phi that was; "none" does not train
            phi.
        reference: "frozen" is the initial policy; "policy" is the current policy, which needs no extra model.
        loss: "ce" or "dpo", see above.
        every: "step" scores and trains once per batch; "epoch" does so in each of `[training] epochs`, between the
            epochs of the policy, as in the paper's algorithm.
        path: model that phi starts from instead of the initial policy; it needs the policy's tokenizer.

    Metrics, of the scores before this step's update of phi: prm/loss; prm/accuracy, the share of (correct, wrong) pairs
    of a group in which the correct answer has the higher r_phi, ties counting half; prm/reward_mean, the mean r_phi;
    prm/grad_norm.

    References: Cui et al., Process Reinforcement through Implicit Rewards (PRIME), arXiv:2502.01456; Yuan et al.,
        Free Process Rewards without Process Labels, arXiv:2412.01981.
    """

    def __init__(  # noqa: PLR0913 - the policy, the tokenizer and eight keys
        self,
        policy: TorchPolicy,
        tokenizer: Any,
        *,
        beta: _Positive = 0.05,
        lr: _Positive = 1e-6,
        max_grad_norm: _Positive = 10.0,
        update: Literal["after", "before", "none"] = "after",
        reference: Literal["frozen", "policy"] = "frozen",
        loss: Literal["ce", "dpo"] = "ce",
        every: Literal["step", "epoch"] = "step",
        path: str | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._beta = beta
        self._update = update
        self._loss = loss
        self.every_epoch = every == "epoch"
        settings = own_optimizer(policy, "prm", lr, max_grad_norm)
        self.model = trained_second_model(policy, tokenizer, "prm", settings, path, "[prime] path")
        self._frozen = policy.reference() if reference == "frozen" else None
        # With LoRA the reference is the policy's own base and not a copy.
        copied = self._frozen is not None and policy.adapter is None
        self.fingerprint = fingerprint(policy.reference_weights()) if copied else ""
        term = Component("loss", "outcome", outcome_loss, "prime").bind({"beta": beta})
        self._objective = Objective([term], find("reduction", "sequence_mean").bind())

    def before(self, batch: Batch) -> Metrics:
        """With update = "before": compute the scores, return their metrics, and train phi."""
        return self._learn(batch.replace(process_rewards=self.score(batch))) if self._update == "before" else {}

    def after(self, batch: Batch) -> Metrics:
        """Return metrics of the scores that credit used; with update = "after", train phi as well."""
        return {} if self._update == "before" else self._learn(batch)

    def state_dict(self) -> State:
        return {"model": self.model.state_dict(), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            StorageError: the reference is not that of the checkpoint's run.
        """
        check_start(self.fingerprint, state["fingerprint"], "the reference of the process reward model")
        self.model.load_state_dict(state["model"])

    def export(self, folder: Path) -> None:
        """Write the model in transformers format (an adapter merged), with its frozen reference in `reference/`."""
        from retrain.training.model.loading import save_model

        save_model(folder, self.model.model, self._tokenizer, self.model.weights())
        if self._frozen is not None:
            save_model(folder / REFERENCE, self.model.model, self._tokenizer, self._policy.reference_weights())
        facts = {"beta": self._beta, "temperature": self.model.settings.temperature, "steps": self.model.step}
        (folder / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def score(self, batch: Batch) -> Tensor:
        """Compute the process rewards [N, T] of a batch's tokens."""
        logprobs = self.model.logprobs(batch)["old_logprobs"]
        other = self._policy.logprobs(batch)["old_logprobs"] if self._frozen is None else self._frozen(batch)
        return self._beta * (logprobs - other)

    def _learn(self, batch: Batch) -> Metrics:
        """Return metrics of the batch's scores; unless update = "none", take an optimizer step on the policy's rows."""
        # A truncated row that is masked has no tokens, and its score of 0 would count as an opinion.
        rows = batch.rows((~batch.is_expert & batch.response_mask.any(-1)).nonzero()[:, 0])
        if not len(rows.correct):
            return {}
        scores = sequence_scores(rows.column("process_rewards"), rows.response_mask)
        metrics = {"prm/reward_mean": float(scores.mean())} | pair_accuracy(scores, rows.correct, rows.group_ids)
        rows, scores = self._compared(rows, scores)
        if not len(scores):
            return metrics
        metrics["prm/loss"] = float(row_loss(scores, rows.correct, rows.column("opposite")).mean())
        if self._update == "none":
            return metrics
        report = self.model.update(rows, self._objective)
        return metrics | {"prm/grad_norm": report["grad/norm"], "prm/nonfinite": report["update/nonfinite"]}

    def _compared(self, rows: Batch, scores: Tensor) -> tuple[Batch, Tensor]:
        """Select the rows that the loss uses.

        Returns:
            The rows, with the score m of the loss as the column `opposite` [n] (0 with "ce"), and their scores [n].
        """
        if self._loss == "ce":
            return rows.replace(opposite=scores.new_zeros(scores.shape)), scores
        opposite, has_opposite = opposite_mean(scores, rows.correct, rows.group_ids)
        index = has_opposite.nonzero()[:, 0]
        return rows.replace(opposite=opposite).rows(index), scores[index]


def outcome_loss(  # noqa: PLR0913 - six columns and a key
    logprobs: Tensor,
    old_logprobs: Tensor,
    process_rewards: Tensor,
    correct: Tensor,
    opposite: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Loss of each row, repeated at each of its response tokens; the reduction "sequence_mean" averages it over rows.

    r_phi = sum_t [process_rewards_t + beta * (lp_t - old_lp_t)]

    This is the earlier score plus the change of phi since then, so that the reference need not be scored again.

    Args:
        logprobs: [N, T], of phi, with gradient.
        old_logprobs: [N, T], of phi when `process_rewards` was computed.
        process_rewards: [N, T].
        correct: [N] bool.
        opposite: [N], the score that r_phi is compared with; 0 for cross-entropy.
        response_mask: [N, T] bool.
        beta: scale of the rewards.
    Returns:
        [N, T] in nats, 0 outside response_mask.
    """
    scores = sequence_scores(process_rewards + beta * (logprobs - old_logprobs), response_mask)
    return F.masked.expand(row_loss(scores, correct, opposite), response_mask)


def sequence_scores(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Score r_phi(y) [N] of each row: the sum of its process rewards [N, T] over the response, end token included."""
    return F.masked.keep(rewards, response_mask).sum(-1)


def row_loss(scores: Tensor, correct: Tensor, opposite: Tensor) -> Tensor:
    """Loss of each row: -log sigmoid(score - opposite) if it is correct, -log sigmoid(opposite - score) if not.

    Computed as log(1 + exp(-margin)) without overflow. All tensors are [N].
    """
    # +1 for correct rows, -1 for wrong ones.
    margin = (scores - opposite) * (2 * correct.to(scores.dtype) - 1)
    return margin.new_zeros(()).logaddexp(-margin)


def opposite_mean(scores: Tensor, correct: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean score of the group's rows of the other correctness.

    Args:
        scores: [N]; correct: [N] bool; group_ids: [N] int64.
    Returns:
        The mean [N], and [N] bool: True if the group has such rows.
    """
    right = F.groups.group_mean(scores, group_ids, correct)
    wrong = F.groups.group_mean(scores, group_ids, ~correct)
    count = F.groups.group_size(group_ids, correct)
    # The number of rows of the other correctness.
    others = (F.groups.group_size(group_ids) - count).where(correct, count)
    return wrong.where(correct, right), others > 0


def pair_accuracy(scores: Tensor, correct: Tensor, group_ids: Tensor) -> Metrics:
    """Share of (correct, wrong) pairs within groups whose correct row has the higher score; ties count half.

    Args:
        scores: [N]; correct: [N] bool; group_ids: [N] int64.
    Returns:
        {"prm/accuracy": share}; {} without such a pair.
    """
    pairs = (group_ids[:, None] == group_ids) & correct[:, None] & ~correct
    if not bool(pairs.any()):
        return {}
    difference = scores[:, None] - scores
    won = (difference > 0).double() + 0.5 * (difference == 0).double()
    return {"prm/accuracy": float(won[pairs].mean())}
