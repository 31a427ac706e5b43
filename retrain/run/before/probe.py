"""Call the components of credit and loss once on a small synthetic batch, before a model is loaded."""

from __future__ import annotations

from typing import Any

import torch

from retrain.algorithms.graph.objective import Objective
from retrain.config.loaded_config import LoadedConfig
from retrain.errors import RetrainError
from retrain.registry import Component
from retrain.types import BASE_COLUMNS, POLICY_COLUMNS, Batch

_GROUPS, _PROMPT = 4, 3
"""Number of groups in the synthetic batch; number of tokens in each prompt."""
_RUN_SCALARS = ("seed", "total_steps", "max_tokens", "group_size", "temperature", "search_paths")
"""Resources of a component that are known without a model."""


def synthetic_batch(group_size: int, max_tokens: int) -> Batch:
    """Return 4 groups of random completions of different lengths, with the policy's columns.

    One group is all wrong, one all right, and in the others every second completion is right: what divides by the
    spread of a group's rewards fails here, and not in the first step with such a group.
    """
    # A fixed seed: `explain` shows the same result each time.
    draw = torch.Generator().manual_seed(0)
    # Twelve tokens are enough to see whether the computation works.
    rows, width = _GROUPS * group_size, _PROMPT + min(max_tokens, 12)
    lengths = torch.randint(1, width - _PROMPT + 1, (rows,), generator=draw)
    column = torch.arange(width)
    attention = column < _PROMPT + lengths[:, None]
    response = attention & (column >= _PROMPT)
    logprobs = -torch.rand(rows, width, generator=draw) * response
    rewards = (torch.arange(rows) % 2).float()
    rewards[:group_size], rewards[group_size : 2 * group_size] = 0.0, 1.0
    return Batch(
        input_ids=torch.randint(0, 100, (rows, width), generator=draw) * attention,
        attention_mask=attention,
        response_mask=response,
        sampler_logprobs=logprobs,
        rewards=rewards,
        correct=rewards > 0,
        lengths=lengths,
        group_ids=torch.arange(_GROUPS).repeat_interleave(group_size),
        is_expert=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.zeros(rows, width),
        max_tokens=max_tokens,
        extra={name: logprobs if name == "old_logprobs" else -logprobs for name in POLICY_COLUMNS},
    )


def probe(loaded: LoadedConfig) -> str:
    """Compute credit, loss and gradient of the synthetic batch, and return "ok: ..." or "failed: ..."."""
    try:
        return f"ok: {_credit_and_loss(loaded)}"
    except RetrainError as error:
        return f"failed: {error}"
    except Exception as error:  # user code may raise any exception; it is shown to the user
        return f"failed: {type(error).__name__}: {error}"


def gives_no_credit(loaded: LoadedConfig) -> bool:
    """Return True if no row of the synthetic batch is left to train on; credit that fails here is not judged."""
    try:
        return _credit(loaded)[2] == 0
    except Exception:  # the run reports what it raises, with the rows that it fails on
        return False


def _credit(loaded: LoadedConfig) -> tuple[Objective, Batch, float]:
    """Return the objective, the synthetic batch with its credit, and the share of its rows that are trained on."""
    training = loaded.config.training
    batch = synthetic_batch(training.group_size, training.max_tokens)
    objective = loaded.objective(exact=False)
    needs_model = [
        stage.name for stage in loaded.pipeline.graph if stage.stateful and not set(stage.needs) <= set(_RUN_SCALARS)
    ]
    batch = batch.replace(**{name: _stand_in(name, batch) for name in needs_model})
    given = frozenset((*needs_model, *POLICY_COLUMNS))
    pipeline = loaded.pipeline_of(objective, given=given)
    pipeline.build(loaded.resources)
    pipeline.before(batch)
    batch, _ = pipeline.credit(batch)
    return objective, batch, float(pipeline.informative(batch)[0].float().mean())


def _credit_and_loss(loaded: LoadedConfig) -> str:
    objective, batch, kept = _credit(loaded)
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    step_columns, _ = objective.step_columns(batch, batch.sampler_logprobs)
    columns = {name: batch.column(name) for name in objective.reads} | step_columns | {"logprobs": logprobs}
    step = objective.step(batch)
    loss, _ = step.of(columns, step.weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return f"loss {loss.item():.4g}, gradient norm {gradient.norm().item():.4g}, {kept:.0%} of rows informative"


def depends_on_rows(term: Component, objective: Objective) -> bool:
    """Return True if the values of a loss term on some rows change with the other rows that it is called with.

    The term is called on the synthetic batch whole and in two halves, as an update calls it on micro-batches. A term
    that fails here, or that differs between two calls on the same rows, is not judged.
    """
    batch = synthetic_batch(8, 64)
    draw = torch.Generator().manual_seed(1)
    advantages = torch.randn(batch.input_ids.shape, generator=draw) * batch.response_mask
    logprobs = batch.sampler_logprobs + 0.1 * torch.randn(batch.input_ids.shape, generator=draw)
    batch = batch.replace(advantages=advantages, logprobs=logprobs * batch.response_mask)
    try:
        for name in (*objective.reads, *term.reads):
            if name not in BASE_COLUMNS and name not in batch.extra:
                batch = batch.replace(**{name: _stand_in(name, batch)})
        batch = batch.replace(**objective.step_columns(batch, batch.column("logprobs"))[0])
        every = torch.arange(len(batch.rewards))

        def values(rows: torch.Tensor) -> torch.Tensor:
            part = batch.rows(rows)
            result = term(*(part.column(name) for name in term.reads))
            value = result[0] if isinstance(result, tuple) else result
            return torch.where(part.response_mask, value, 0.0).sum(-1)

        whole, again = values(every), values(every)
        # Every second row, so that both halves have rows of every group.
        halves = torch.cat([values(every[0::2]), values(every[1::2])])
    except Exception:  # the run reports what it raises, with the rows that it fails on
        return False
    split = torch.cat([every[0::2], every[1::2]])
    # Sums of float32 in another order differ by less than these tolerances.
    return torch.equal(whole, again) and not torch.allclose(whole[split], halves, rtol=1e-4, atol=1e-6)


def _stand_in(name: str, batch: Batch) -> Any:
    """Return a substitute for a signal that needs the model: a mask if its name ends with _mask, else log-probs."""
    if name.endswith("_mask"):
        return batch.response_mask & (torch.arange(batch.response_mask.shape[1]) % 3 == 0)
    return batch.sampler_logprobs
