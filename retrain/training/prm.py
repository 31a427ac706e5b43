"""An implicit process reward model, trained as the policy is; importing this imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.graph.objective import Objective
from retrain.protocols import Policy, StatefulComponent
from retrain.registry import Component, Finding, find, signal
from retrain.training.auxiliary.second_model import check_path, own_optimizer, trained_beside
from retrain.training.reference import check_start, fingerprint, unjudged
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

_Positive = Annotated[float, Field(gt=0)]
FACTS = "prm.json"
"""File of an exported model with what its scores depend on: beta, temperature, optimizer steps."""
REFERENCE = "reference"
"""Folder of an exported model with the model that it is compared with."""


_LEARNS = ("update", ("after", "before"))


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """A reward model that cannot know anything, or that is nowhere."""
    path: str | None = params["path"]
    if path is None and params["update"] == "none" and params["reference"] == "frozen":
        problem = "a process reward model that starts as its reference and never learns gives no reward but 0"
        yield Finding(("update",), problem, 'use update = "after", or name a trained model in [prime] path')
    yield from check_path(path, config, "process reward model")


@signal(
    "process_rewards",
    table="prime",
    check=_check,
    models=("trained", "frozen"),
    when={"lr": _LEARNS, "max_grad_norm": _LEARNS},
)
class ProcessRewards(StatefulComponent):
    """r_t = beta * (log phi(y_t) - log ref(y_t)) at each response token, [N, T], 0 elsewhere.

    phi is a language model that starts where the policy starts and learns, from outcomes alone, that
    r_phi(y) = sum_t r_t is the log-odds of a correct answer. Its loss, a mean over the policy's rows:

    ce   -log sigmoid(r_phi) on correct rows, -log sigmoid(-r_phi) on wrong ones
    dpo  -log sigmoid(+-(r_phi - mean r_phi of the group's rows of opposite correctness)), the mean without
         gradient; rows whose group has none take no part

    Log-probs are taken at the sampling temperature, in phi as in ref. With LoRA phi is one more adapter on the
    policy's base model, and the reference is the base model without any. Rows of experts do not train it.

    Args:
        beta: scale of the rewards.
        lr, max_grad_norm: of phi's optimizer, AdamW without decay at a constant rate.
        update: "after" the policy's update, so that phi has not seen the outcomes it is to predict; "before" it,
            so that the same rewards are scored by a phi that was; "none" leaves phi as it is.
        reference: "frozen" is the initial policy; "policy" the policy as it is when it is scored: no extra model.
        loss: see above.
        every: "step" scores and updates once for a batch; "epoch" in each of `[training] epochs`, between those of the
            policy, as the algorithm is printed.
        path: a model that phi starts from instead of the initial policy, with the same tokenizer.

    Metrics, of the scores before this step's update: prm/loss; prm/accuracy, the share of (correct, wrong) pairs of
    a group whose correct answer has the higher r_phi, ties counting half; prm/reward_mean; prm/grad_norm.

    References: Cui et al., Process Reinforcement through Implicit Rewards (PRIME), arXiv:2502.01456; Yuan et al.,
        Free Process Rewards without Process Labels, arXiv:2412.01981.
    """

    def __init__(  # noqa: PLR0913 - two parts of the run and seven keys, each with its name
        self,
        policy: Policy,
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
        self._policy, self._tokenizer, self._beta = policy, tokenizer, beta
        self._update, self._loss, self.every_epoch = update, loss, every == "epoch"
        settings = own_optimizer(policy, "prm", lr, max_grad_norm)
        self.model = trained_beside(policy, tokenizer, "prm", settings, path, "[prime] path")
        self._frozen = policy.reference() if reference == "frozen" else None
        copied = self._frozen is not None and policy.adapter is None
        self.fingerprint = fingerprint(policy.reference_weights()) if copied else ""
        term = Component("loss", "outcome", outcome_loss, "prime").bind({"beta": beta})
        self._objective = Objective([term], find("reduction", "sequence_mean").bind())

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, sampler_logprobs: Tensor
    ) -> Tensor:
        return self._score(unjudged(input_ids, attention_mask, response_mask, sampler_logprobs))

    def before(self, batch: Batch) -> Metrics:
        """With update = "before": score, report, learn."""
        return self._learn(batch.replace(process_rewards=self._score(batch))) if self._update == "before" else {}

    def after(self, batch: Batch) -> Metrics:
        """Report on the scores that credit was given by, and learn unless the update is "none"."""
        return {} if self._update == "before" else self._learn(batch)

    def state_dict(self) -> State:
        return {"model": self.model.state_dict(), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: State) -> None:
        """StorageError if this run's initial weights are not those that the checkpoint's run started from."""
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

    def _score(self, batch: Batch) -> Tensor:
        own = self.model.logprobs(batch)["old_logprobs"]
        other = self._policy.logprobs(batch)["old_logprobs"] if self._frozen is None else self._frozen(batch)
        return self._beta * (own - other)

    def _learn(self, batch: Batch) -> Metrics:
        """Metrics of the scores in the batch and, unless switched off, one optimizer step on the policy's rows."""
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
        """The rows to learn from, with what each is compared with as the column `opposite`, and their scores."""
        if self._loss == "ce":
            return rows.replace(opposite=scores.new_zeros(scores.shape)), scores
        opposite, known = opposite_mean(scores, rows.correct, rows.group_ids)
        index = known.nonzero()[:, 0]
        return rows.replace(opposite=opposite).rows(index), scores[index]


def outcome_loss(  # noqa: PLR0913 - six columns and a key, each with its name
    logprobs: Tensor,
    old_logprobs: Tensor,
    process_rewards: Tensor,
    correct: Tensor,
    opposite: Tensor,
    response_mask: Tensor,
    *,
    beta: float,
) -> Tensor:
    """The loss of each row at each of its tokens; a reduction by rows makes it the mean over rows.

    r_phi = sum_t [process reward_t + beta * (lp_t - old_lp_t)]: the score as it was, moved by what phi has learned
    since. So the reference is not scored again.

    Args:
        logprobs, old_logprobs: [N, T], of phi now (with gradient) and when `process_rewards` [N, T] was scored.
        correct: [N] bool; opposite: [N], what r_phi is compared with (0 for the cross-entropy); response_mask: [N, T].
    """
    scores = sequence_scores(process_rewards + beta * (logprobs - old_logprobs), response_mask)
    return F.masked.expand(row_loss(scores, correct, opposite), response_mask)


def sequence_scores(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """r_phi(y), [N]: the sum of a row's process rewards [N, T], end-of-sequence included."""
    return F.masked.keep(rewards, response_mask).sum(-1)


def row_loss(scores: Tensor, correct: Tensor, opposite: Tensor) -> Tensor:
    """-log sigmoid(+-(score - opposite)), + where correct, as log(1 + exp(.)) without overflow; all [N]."""
    margin = (scores - opposite) * (2 * correct.to(scores.dtype) - 1)
    return margin.new_zeros(()).logaddexp(-margin)


def opposite_mean(scores: Tensor, correct: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean score of the group's rows of the other correctness, and whether there are any; [N] each."""
    right = F.groups.group_mean(scores, group_ids, correct)
    wrong = F.groups.group_mean(scores, group_ids, ~correct)
    count = F.groups.group_size(group_ids, correct)
    others = (F.groups.group_size(group_ids) - count).where(correct, count)
    return wrong.where(correct, right), others > 0


def pair_accuracy(scores: Tensor, correct: Tensor, group_ids: Tensor) -> Metrics:
    """prm/accuracy over the (correct, wrong) pairs within groups; nothing if there is no such pair."""
    pairs = (group_ids[:, None] == group_ids) & correct[:, None] & ~correct
    if not bool(pairs.any()):
        return {}
    difference = scores[:, None] - scores
    won = (difference > 0).double() + 0.5 * (difference == 0).double()
    return {"prm/accuracy": float(won[pairs].mean())}
