"""Conversion of rollouts and expert rows to a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrain.types import Batch, ExpertRow, Rollout


@dataclass(frozen=True)
class Layout:
    """Makes batches from the rollouts of a run.

    Attributes:
        pad_id: token id of padding; padding is recognised by the masks, never by this id.
        device: device of the batches.
        max_tokens: most tokens that are sampled for one response.
        mask_truncated: do not train on rollouts that a token limit ended: their response mask is False everywhere.
        rewards: (name of the part, weight) of each of `[[rewards]]`; empty: the whole reward is the only part.
    """

    pad_id: int
    device: Any
    max_tokens: int
    mask_truncated: bool = False
    rewards: tuple[tuple[str, float], ...] = ()

    def batch(self, rollouts: Sequence[Rollout], step: int, experts: Sequence[ExpertRow] = ()) -> Batch:
        """Make a right-padded batch of the rollouts, followed by the expert rows.

        An expert row has reward 0 and advantage 0, and is the only row of its group.

        Args:
            rollouts: rows that the policy sampled.
            step: the training step, from 0.
            experts: rows to imitate.
        Returns:
            A batch of N = len(rollouts) + len(experts) rows; its advantages are 0.
        """
        rows = [((*r.prompt_ids, *r.completion_ids), self._spans(r), r.sampler_logprobs) for r in rollouts]
        rows += [(row.ids, list(row.spans), ()) for row in experts]
        shape = (len(rows), max(len(ids) for ids, _, _ in rows))
        none = [0.0] * len(experts)
        input_ids = torch.full(shape, self.pad_id, dtype=torch.long)
        attention, response = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        logprobs = torch.zeros(shape)
        for row, (ids, spans, scores) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            attention[row, : len(ids)] = True
            for start, end in spans:
                response[row, start:end] = True
            logprobs[row, len(ids) - len(scores) : len(ids)] = torch.tensor(scores)  # one per token after the prompt
        turn_ids, turn_rewards = _turns(rollouts, shape)
        greedy = [math.nan if r.greedy is None else r.greedy for r in rollouts] + [math.nan] * len(experts)
        # Groups of their own, behind those of the rollouts, so that no baseline mixes both.
        first = max((rollout.group for rollout in rollouts), default=-1) + 1
        lengths = [*(r.length for r in rollouts), *(sum(end - start for start, end in row.spans) for row in experts)]
        groups = [*(r.group for r in rollouts), *range(first, first + len(experts))]
        device = self.device
        return Batch(
            input_ids=input_ids.to(device),
            attention_mask=attention.to(device),
            response_mask=response.to(device),
            # Observations and masked rollouts have no log-probs to compare with.
            sampler_logprobs=logprobs.where(response, 0.0).to(device),
            rewards=torch.tensor([*(r.reward for r in rollouts), *none], dtype=torch.float32, device=device),
            correct=torch.tensor([*(bool(r.correct) for r in rollouts), *map(bool, none)], device=device),
            lengths=torch.tensor(lengths, device=device),
            group_ids=torch.tensor(groups, device=device),
            is_expert=(torch.arange(len(rows)) >= len(rollouts)).to(device),
            advantages=torch.zeros(shape, device=device),
            turn_ids=turn_ids.to(device),
            turn_rewards=turn_rewards.to(device),
            anchor_ids=_anchors(rollouts, shape).to(device),
            greedy_rewards=torch.tensor(greedy, dtype=torch.float32, device=device),
            **self._parts(rollouts, len(experts)),
            step=step,
            max_tokens=self.max_tokens,
        )

    def _parts(self, rollouts: Sequence[Rollout], experts: int) -> dict[str, Any]:
        """Columns `reward_parts` [N, R] and `reward_weights` of R named rewards; {} without names."""
        if not self.rewards:
            return {}
        part_scores = [[rollout.parts.get(name) for name, _ in self.rewards] for rollout in rollouts]
        rows = [[math.nan if part is None else part for part in row] for row in part_scores]
        rows += [[math.nan] * len(self.rewards)] * experts
        parts = torch.tensor(rows, dtype=torch.float32, device=self.device)
        return {"reward_parts": parts, "reward_weights": tuple(weight for _, weight in self.rewards)}

    def _spans(self, rollout: Rollout) -> list[tuple[int, int]]:
        return [] if self.mask_truncated and rollout.truncated else rollout.spans


def _turns(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Columns `turn_ids` and `turn_rewards`, each [N, T].

    The last turn of a rollout gets the part of the reward that the environment did not assign to a turn.
    """
    turn_ids, turn_rewards = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        rest = (rollout.reward or 0.0) - sum(turn.reward for turn in rollout.turns)
        for number, (turn, (start, end)) in enumerate(zip(rollout.turns, rollout.spans, strict=True)):
            turn_ids[row, start:end] = number
            turn_rewards[row, end - 1] = turn.reward + rest * (number == len(rollout.turns) - 1)
    return turn_ids, turn_rewards


def _anchors(rollouts: Sequence[Rollout], shape: tuple[int, int]) -> Tensor:
    """Column `anchor_ids` [N, T]: equal numbers for turns of one group that began in the same state; -1 elsewhere."""
    anchors, numbers = torch.full(shape, -1), dict[tuple[int, str], int]()
    for row, rollout in enumerate(rollouts):
        for turn, (start, end) in zip(rollout.turns, rollout.spans, strict=True):
            if turn.state:
                anchors[row, start:end] = numbers.setdefault((rollout.group, turn.state), len(numbers))
    return anchors
