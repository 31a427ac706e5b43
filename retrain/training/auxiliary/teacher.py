"""A teacher's log-probs of what the policy sampled; importing this imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from retrain import functional as F
from retrain.errors import DataError
from retrain.protocols import Policy, StatefulComponent
from retrain.registry import Finding, signal
from retrain.system.model_paths import RANDOM_MODEL, positions, problem_with
from retrain.training.auxiliary.second_model import load_second_model, own_optimizer
from retrain.training.chat import Chat, Messages
from retrain.training.reference import check_start, sample_digest, scoring_batch
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATE = "A correct answer to the question below:\n{hint}\n\n{prompt}"
"""Prompt of a teacher that has seen a hint."""
_MODEL, _HINDSIGHT = ("source", ("model",)), ("source", ("hindsight",))


def _check(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Find a teacher that is nowhere, that knows no more than the policy, or that has no hint to know it from."""
    yield from (_check_hindsight if params["source"] == "hindsight" else _check_model)(params, config)


def _check_hindsight(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    if missing := [one for one in ("{hint}", "{prompt}") if one not in params["template"]]:
        yield Finding(("template",), f"lacks {' and '.join(missing)}", "say where the hint and the prompt stand")
    if config.rollout.overlap:
        problem = "the prompt of a batch that waits for its step is not stored, so that no hint can be put before it"
        yield Finding(("source",), problem, "use [rollout] overlap = 0")
    if config.training.group_size == 1 and not params["feedback"]:
        problem = "a group of one has no other completion to take a hint from"
        yield Finding(("source",), problem, "raise [training] group_size, or set feedback = true", fatal=False)


def _check_model(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    path: str | None = params["model"]
    if path is None and config.model.lora is None:
        yield Finding(("model",), "names no teacher", 'set [teacher] model, or source = "hindsight"')
    elif path == RANDOM_MODEL:
        yield Finding(("model",), f'"{path}" is made, not trained: it has nothing to teach', "name a trained model")
    elif path is not None and (problem := problem_with(path)):
        yield Finding(("model",), *problem)
    elif path in (None, config.model.path):
        problem = "the teacher is the policy as it was before training, so that opd is a KL penalty against it"
        yield Finding((), problem, "name a better model in [teacher] model", fatal=False)


def _models(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the models that a teacher holds, as the trait `models` counts them."""
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
    """log p of each response token under a teacher, [N, T] nats at the sampling temperature, 0 elsewhere.

    With source "model" the teacher is another model, frozen and sharded as the policy is; without `model` it is the
    base under LoRA's adapters. With "hindsight" it is the policy itself under a prompt with a hint: the first *other*
    completion of the group whose reward is at least `threshold`, or else, with `feedback`, what the environment said
    in the episode. A row without a hint gets the sampler's log-probs, so that nothing is learned from it.

    Args:
        source: see above.
        model: a directory or a name on the hub, with the policy's tokenizer; revision: of a hub model.
        dtype: in which the teacher's weights are held and multiplied.
        weights: in hindsight, those of the "current" policy, of the "initial" one, or "ema", an average that follows
            the policy.
        ema_rate: share of the policy's weights in each step of the average; with LoRA that of the adapters.
        template: of the prompt with {hint} and {prompt}; of a chat it is put into the last message.
        threshold: least reward of a completion that is shown.
        feedback: show what the environment said where no completion can be shown.

    Metrics: teacher/gap, mean of teacher - sampler in nats per token; in hindsight teacher/hints, the share of rows
    with a hint.

    References: Agarwal et al., On-Policy Distillation, arXiv:2306.13649; Hübotter et al., Self-Distillation Policy
        Optimization (SDPO), arXiv:2601.20802.
    """

    def __init__(  # noqa: PLR0913 - three parts of the run and nine keys, each with its name
        self,
        policy: Policy,
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
        elif weights == "ema":
            self._average = policy.sibling("teacher", own_optimizer(policy, "teacher", 1.0, 1.0))
            self._average.follow(policy, 1.0)  # LoRA draws a new adapter its own initial values
            self._score = partial(_scored_by, self._average)
        else:
            self._score = partial(_scored_by, policy)

    def __call__(  # noqa: PLR0913 - seven columns, each with its name
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
        found, metrics = self._in_hindsight(batch) if self._is_hindsight else (self._score(batch), Metrics())
        gap = F.masked.masked_mean(found - sampler_logprobs, response_mask)
        return found, metrics | {"teacher/gap": float(gap)}

    def after(self, batch: Batch) -> Metrics:
        """Let the average follow the policy."""
        if self._average is not None:
            self._average.follow(self._policy, self._rate)
        return {}

    def state_dict(self) -> State:
        average = {} if self._average is None else {"average": self._average.state_dict()}
        return {"fingerprint": self.fingerprint, **average}

    def load_state_dict(self, state: State) -> None:
        """StorageError if the teacher is not the model that the checkpoint's run had."""
        check_start(self.fingerprint, state["fingerprint"], "the teacher")
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def _loaded(self, tokenizer: Any, path: str, **options: Any) -> Callable[[Batch], Tensor]:
        """Read the model at a path; return its scores."""
        from retrain.training.model.forward import Forward
        from retrain.training.shards import shard

        policy, dtype = self._policy, options["dtype"]
        model, source = load_second_model(policy, tokenizer, path, "[teacher] model", **options)
        model.eval().requires_grad_(False)
        settings = replace(policy.settings, lora=None, quantization=None, dtype=dtype)
        forward = Forward(model, settings, shard(model, settings, policy.ranks, source))
        self.fingerprint = sample_digest(forward.weights())
        return lambda batch: forward.logprobs(batch)["old_logprobs"]

    def _in_hindsight(self, batch: Batch) -> tuple[Tensor, Metrics]:
        rows, hinted = self._hints.applied(batch)
        found, own = batch.sampler_logprobs.clone(), batch.response_mask.any(-1)
        if hinted is not None:
            scores = F.returns.pack(self._score(hinted), hinted.response_mask)
            found[rows] = F.returns.unpack(scores, batch.response_mask[rows])
        return F.masked.keep(found, batch.response_mask), {"teacher/hints": len(rows) / max(1, int(own.sum()))}


class _Hints(NamedTuple):
    """Prompts that show what the policy could not know when it sampled.

    Attributes:
        chat: renders them.
        template, threshold, feedback: as of `TeacherLogprobs`.
        longest: tokens of prompt and completion together that the model takes.
    """

    chat: Chat
    template: str
    threshold: float
    feedback: bool
    longest: float

    def applied(self, batch: Batch) -> tuple[Tensor, Batch | None]:
        """Return the rows that have a hint, and the batch of them under prompts that show it; None without any."""
        import torch

        ids = [self._ids(batch, row) for row in range(len(batch.rewards))]
        rows = [row for row, found in enumerate(ids) if found]
        index = torch.tensor(rows, dtype=torch.long, device=batch.input_ids.device)
        if not rows:
            return index, None
        known = [(ids[row], batch.response_mask[row, _first(batch, row) :].tolist()) for row in rows]
        shape = (len(rows), max(len(tokens) for tokens, _ in known))
        tokens, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        response = torch.zeros(shape, dtype=torch.bool)
        for place, (row, mask) in enumerate(known):
            length = int(batch.attention_mask[rows[place]].sum()) - _first(batch, rows[place])
            tokens[place, : len(row)] = torch.tensor(row)
            attention[place, : len(row)] = True
            response[place, len(row) - length : len(row)] = torch.tensor(mask[:length])
        device, blank = batch.input_ids.device, torch.zeros(shape)
        moved = [one.to(device) for one in (tokens, attention, response, blank)]
        return index, scoring_batch(*moved)

    def _ids(self, batch: Batch, row: int) -> list[int]:
        """Return the row's tokens behind a prompt with a hint; none if there is no hint, or no room for it."""
        group, first = int(batch.group_ids[row]), _first(batch, row)
        if group not in batch.problems or not bool(batch.response_mask[row].any()):
            return []
        problem, prompt = batch.problems[group]
        end = int(batch.attention_mask[row].sum())
        # An environment that speaks before the first turn has rendered another prompt.
        hint = self._hint(batch, row) if batch.input_ids[row, :first].tolist() == list(prompt.ids) else ""
        if not hint:
            return []
        try:
            shown = self.chat.prompt(self._written(problem.prompt, hint)).ids
        except DataError:  # a template that refuses the message
            return []
        found = [*shown, *batch.input_ids[row, first:end].tolist()]
        return found if len(found) <= self.longest else []

    def _hint(self, batch: Batch, row: int) -> str:
        others = (batch.group_ids == batch.group_ids[row]) & (batch.rewards >= self.threshold)
        others &= batch.response_mask.any(-1)
        for other in others.nonzero()[:, 0].tolist():
            if other != row:
                return self._decoded(batch, other, batch.response_mask[other])
        if not self.feedback:
            return ""
        said = batch.attention_mask[row] & ~batch.response_mask[row]
        said[: _first(batch, row)] = False
        return self._decoded(batch, row, said)

    def _decoded(self, batch: Batch, row: int, mask: Tensor) -> str:
        return self.chat.decode(batch.input_ids[row][mask].tolist()).strip()

    def _written(self, prompt: str | Messages, hint: str) -> str | Messages:
        hint = self.chat.quoted(hint)
        if isinstance(prompt, str):
            parts = {"prompt": prompt, "hint": hint}
            return re.sub(r"\{(prompt|hint)\}", lambda found: parts[found[1]], self.template)
        last = {**prompt[-1], "content": self._written(prompt[-1]["content"], hint)}
        return [*prompt[:-1], last]  # pyright: ignore[reportReturnType]


def _first(batch: Batch, row: int) -> int:
    """Return the place of the row's first sampled token."""
    return int(batch.response_mask[row].int().argmax())


def _scored_by(policy: Any, batch: Batch) -> Tensor:
    return policy.logprobs(batch)["old_logprobs"]
