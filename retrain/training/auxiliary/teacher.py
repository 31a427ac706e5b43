"""A teacher's log-probs of the policy's tokens. Importing this imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from retrain import functional as F
from retrain.errors import DataError
from retrain.protocols import StatefulComponent
from retrain.registry import Finding, signal
from retrain.system.model_paths import RANDOM_MODEL, positions, problem_with
from retrain.training.auxiliary.second_model import load_second_model, own_optimizer
from retrain.training.chat import Chat, Messages
from retrain.training.reference import check_start, sample_digest, scoring_batch
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.training.policy import TorchPolicy

TEMPLATE = "A correct answer to the question below:\n{hint}\n\n{prompt}"
"""Default template of a prompt with a hint."""
_MODEL, _HINDSIGHT = ("source", ("model",)), ("source", ("hindsight",))
"""Conditions under which a key is used: the key `source` has one of these values."""


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Yield findings on a missing or unsuitable teacher model, or on a configuration that leaves it without hints."""
    if params["source"] == "model":
        path: str | None = params["model"]
        if path is None and config.model.lora is None:
            yield Finding(("model",), "is missing", 'set [teacher] model, or source = "hindsight"')
        elif path == RANDOM_MODEL:
            yield Finding(("model",), f'"{path}" has random weights', "name a trained model")
        elif path is not None and (problem := problem_with(path)):
            yield Finding(("model",), *problem)
        return
    if missing := [part for part in ("{hint}", "{prompt}") if part not in params["template"]]:
        yield Finding(("template",), f"lacks {' and '.join(missing)}", "add it where the hint or the prompt belongs")
    if config.rollout.ahead:
        problem = "prompts of batches that are sampled ahead are not stored, so a hint cannot be added to them"
        yield Finding(("source",), problem, "set [rollout] overlap = 0")


def _models(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the models that a teacher uses, in the format of the trait `models`."""
    if params["source"] == "model":
        return (params["model"] or "frozen",)
    return ({"current": "policy", "ema": "averaged", "initial": "frozen"}[params["weights"]],)


@signal(
    "teacher_logprobs",
    table="teacher",
    check=_check,
    models=_models,
    when={
        **dict.fromkeys(("model", "revision", "dtype"), _MODEL),
        **dict.fromkeys(("weights", "template", "threshold", "feedback"), _HINDSIGHT),
        "ema_rate": ("weights", ("ema",)),
    },
)
class TeacherLogprobs(StatefulComponent):
    """Log-prob of each response token under a teacher, [N, T] in nats, 0 outside response_mask.

    Log-probs are taken at the sampling temperature. With source "model" the teacher is another, frozen model, sharded
    like the policy; if `model` is not set, it is the base model under LoRA's adapter. With source "hindsight" the
    teacher is the policy, whose prompt contains a hint: the first other completion of the group with a reward of at
    least `threshold`. If there is none and `feedback` is set, the hint is the environment's text in the episode. A row
    without a hint gets the sampler's log-probs, which give it no gradient.

    Args:
        source: "model" or "hindsight", see above.
        model: directory or hub name of the teacher; it needs the policy's tokenizer.
        revision: revision of a hub model.
        dtype: dtype of the teacher's weights and matrix products.
        weights: the policy's weights in hindsight: "current", "initial", or "ema", an exponential moving average.
        ema_rate: weight of the policy in each step of the average; with LoRA the adapter is averaged.
        template: text of a prompt with a hint, with the places {hint} and {prompt}; in a chat it replaces the content
            of the last message.
        threshold: lowest reward of a completion that may be a hint.
        feedback: use the environment's text as a hint if the group has no such completion.

    Metrics: teacher/gap, the mean of teacher - sampler log-probs in nats per token; in hindsight teacher/hints, the
    share of rows with a hint.

    References: Agarwal et al., On-Policy Distillation, arXiv:2306.13649; Hübotter et al., Self-Distillation Policy
        Optimization (SDPO), arXiv:2601.20802.
    """

    def __init__(  # noqa: PLR0913 - three parts of the run and nine keys
        self,
        policy: TorchPolicy,
        tokenizer: Any,
        chat: Chat,
        *,
        source: Literal["model", "hindsight"] = "model",
        model: Annotated[str, Field(min_length=1)] | None = None,
        revision: str | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        weights: Literal["current", "ema", "initial"] = "current",
        ema_rate: Annotated[float, Field(gt=0, le=1)] = 0.05,
        template: str = TEMPLATE,
        threshold: float = 1.0,
        feedback: bool = True,
    ) -> None:
        self._policy, self._rate = policy, ema_rate
        self._average: Any = None
        self._hints = _Hints(chat, template, threshold, feedback, positions(policy.model))
        self._is_hindsight, self.fingerprint = source == "hindsight", ""
        if not self._is_hindsight and model is not None:
            self._score = self._loaded(tokenizer, model, revision=revision, dtype=dtype)
        elif not self._is_hindsight or weights == "initial":
            self._score = policy.reference()
        else:
            if weights == "ema":
                self._average = policy.sibling("teacher", own_optimizer(policy, "teacher", 1.0, 1.0))
                self._average.follow(policy, 1.0)  # with LoRA the sibling's adapter has other initial values
            teacher = self._average or policy
            self._score = lambda batch: teacher.logprobs(batch)["old_logprobs"]

    def __call__(  # noqa: PLR0913 - seven columns
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        sampler_logprobs: Tensor,
        rewards: Tensor,
        group_ids: Tensor,
        problems: Mapping[int, Any],
    ) -> tuple[Tensor, Metrics]:
        batch = scoring_batch(input_ids, attention_mask, response_mask, sampler_logprobs)
        batch = batch.replace(rewards=rewards, group_ids=group_ids, problems=problems)
        columns, metrics = self._in_hindsight(batch) if self._is_hindsight else (self._score(batch), Metrics())
        gap = F.masked.masked_mean(columns - sampler_logprobs, response_mask)
        return columns, metrics | {"teacher/gap": float(gap)}

    def after(self, batch: Batch) -> Metrics:
        """Update the moving average of the policy's weights, if there is one."""
        if self._average is not None:
            self._average.follow(self._policy, self._rate)
        return {}

    def state_dict(self) -> State:
        average = {} if self._average is None else {"average": self._average.state_dict()}
        return {"fingerprint": self.fingerprint, **average}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            StorageError: the teacher is not the model of the checkpoint's run.
        """
        check_start(self.fingerprint, state["fingerprint"], "the teacher")
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def _loaded(self, tokenizer: Any, path: str, **options: Any) -> Callable[[Batch], Tensor]:
        """Load the model at a path; return a function that computes its log-probs."""
        from retrain.training.distributed.sharding import shard
        from retrain.training.model.forward import Forward

        policy, dtype = self._policy, options["dtype"]
        model, source = load_second_model(policy, tokenizer, path, "[teacher] model", **options)
        model.eval().requires_grad_(False)
        # The policy's memory limits and temperature, without what belongs to its own training.
        settings = replace(policy.settings, lora=None, quantization=None, dtype=dtype)
        forward = Forward(model, settings, shard(model, settings, policy.ranks, source))
        self.fingerprint = sample_digest(forward.weights())
        return lambda batch: forward.logprobs(batch)["old_logprobs"]

    def _in_hindsight(self, batch: Batch) -> tuple[Tensor, Metrics]:
        rows, hinted = self._hints.applied(batch)
        filled, answered = batch.sampler_logprobs.clone(), batch.response_mask.any(-1)
        if hinted is not None:
            # The rows with hints are longer, so their columns differ; the order of response tokens is the same.
            scores = F.returns.pack(self._score(hinted), hinted.response_mask)
            filled[rows] = F.returns.unpack(scores, batch.response_mask[rows])
        return F.masked.keep(filled, batch.response_mask), {"teacher/hints": len(rows) / max(1, int(answered.sum()))}


class _Hints(NamedTuple):
    """Makes prompts with hints, which the policy did not have when it sampled.

    Attributes:
        chat: renders the prompts.
        template, threshold, feedback: see `TeacherLogprobs`.
        longest: limit of the model on prompt and completion together, in tokens.
    """

    chat: Chat
    template: str
    threshold: float
    feedback: bool
    longest: float

    def applied(self, batch: Batch) -> tuple[Tensor, Batch | None]:
        """Put hints into the prompts.

        Returns:
            Indices [n] of the rows with a hint, and a batch of these rows with the new prompts; None if n = 0.
        """
        import torch

        ids = [self._ids(batch, row) for row in range(len(batch.rewards))]
        rows = [row for row, row_ids in enumerate(ids) if row_ids]
        index = torch.tensor(rows, dtype=torch.long, device=batch.input_ids.device)
        if not rows:
            return index, None
        answers = [(ids[row], batch.response_mask[row, _first(batch, row) :].tolist()) for row in rows]
        shape = (len(rows), max(len(tokens) for tokens, _ in answers))
        tokens, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        response = torch.zeros(shape, dtype=torch.bool)
        for number, (row, mask) in enumerate(answers):
            length = int(batch.attention_mask[rows[number]].sum()) - _first(batch, rows[number])
            tokens[number, : len(row)] = torch.tensor(row)
            attention[number, : len(row)] = True
            response[number, len(row) - length : len(row)] = torch.tensor(mask[:length])
        device, blank = batch.input_ids.device, torch.zeros(shape)
        moved = [tensor.to(device) for tensor in (tokens, attention, response, blank)]
        return index, scoring_batch(*moved)

    def _ids(self, batch: Batch, row: int) -> list[int]:
        """Return the row's token ids with a prompt that contains a hint; [] without a hint, or if they are too many."""
        group, first = int(batch.group_ids[row]), _first(batch, row)
        if group not in batch.problems or not bool(batch.response_mask[row].any()):
            return []
        problem, prompt = batch.problems[group]
        end = int(batch.attention_mask[row].sum())
        # The prompt differs if the environment added messages before the first turn; the row then gets no hint.
        hint = self._hint(batch, row) if batch.input_ids[row, :first].tolist() == list(prompt.ids) else ""
        if not hint:
            return []
        try:
            shown = self.chat.of(problem).prompt(self._written(problem.prompt, hint)).ids
        except DataError:  # a template that refuses the message
            return []
        context = [*shown, *batch.input_ids[row, first:end].tolist()]
        return context if len(context) <= self.longest else []

    def _hint(self, batch: Batch, row: int) -> str:
        others = (batch.group_ids == batch.group_ids[row]) & (batch.rewards >= self.threshold)
        others &= batch.response_mask.any(-1)
        for other in others.nonzero()[:, 0].tolist():
            if other != row:
                return self._decoded(batch, other, batch.response_mask[other])
        if not self.feedback:
            return ""
        # Observations: tokens after the first turn that the policy did not sample.
        said = batch.attention_mask[row] & ~batch.response_mask[row]
        said[: _first(batch, row)] = False
        return self._decoded(batch, row, said)

    def _decoded(self, batch: Batch, row: int, mask: Tensor) -> str:
        return self.chat.decode(batch.input_ids[row][mask].tolist()).strip()

    def _written(self, prompt: str | Messages, hint: str) -> str | Messages:
        hint = self.chat.quoted(hint)
        if isinstance(prompt, str):
            parts = {"prompt": prompt, "hint": hint}
            return re.sub(r"\{(prompt|hint)\}", lambda match: parts[match[1]], self.template)
        last = {**prompt[-1], "content": self._written(prompt[-1]["content"], hint)}
        return [*prompt[:-1], last]  # pyright: ignore[reportReturnType]


def _first(batch: Batch, row: int) -> int:
    """Return the index of the row's first sampled token."""
    return int(batch.response_mask[row].int().argmax())
