"""Call every component once on a small synthetic batch, before a model is loaded."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from string import ascii_lowercase, digits
from typing import Any

import torch

from retrain.algorithms.graph.pipeline import Pipeline
from retrain.config.data_checks import check_data
from retrain.config.environment_checks import launch
from retrain.config.resolve import LoadedConfig, labels
from retrain.environments.env_pool import EnvPool
from retrain.environments.text_episode import text_episode
from retrain.errors import ComponentError, RetrainError
from retrain.functional.seeds import derive_seed
from retrain.rewards.pool import RewardPool
from retrain.rewards.signatures import completion_item
from retrain.training.chat import plain_text
from retrain.types import POLICY_COLUMNS, Batch, Problem

_GROUPS, _PROMPT = 4, 3
"""Number of groups in the synthetic batch; number of tokens in each prompt."""
_EPISODES, _LETTERS = 64, ascii_lowercase + digits + " =+-"
"""Number of problems searched for one of each environment; alphabet of random replies."""
_RUN_SCALARS = ("seed", "total_steps", "max_tokens", "group_size", "temperature", "search_paths")
"""Resources of a component that are known without a model."""


def probe(loaded: LoadedConfig) -> dict[str, str]:
    """Call task, rewards, data checks, credit and loss on synthetic inputs.

    Returns:
        Name of the part -> "ok ..." or "failed: ...".
    """
    problem = attempt(lambda: loaded.task(loaded.config.training.seed).problem(0))
    if isinstance(problem, str):
        results = {"task": problem, "rewards": "skipped: the task gave no problem"}
    else:
        results = {"task": f"ok: {problem.prompt!r} -> {problem.answer!r}"}
        results["rewards"] = _with_status(attempt(lambda: _rewards(loaded, problem)))
        results["data"] = _with_status(attempt(lambda: check_data(loaded)) or "passed the checks before training")
    results["credit and loss"] = _with_status(attempt(lambda: _credit_and_loss(loaded)))
    return results


def episodes(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Play one training episode of each environment without a model; return observations, actions and the end.

    The actions are the task's demonstrations for the warm start, if it has any, else random text.
    """
    missing, found = set(labels(loaded.config)), list[dict[str, Any]]()
    if not missing:
        return []
    task = loaded.task(loaded.config.training.seed)
    with EnvPool(launch(loaded.config, loaded.components)) as pool:
        for problem in map(task.problem, range(_EPISODES)):
            if problem.environment in missing:
                missing.remove(problem.environment)
                found += _episode(loaded, pool, problem)
    return found


def _episode(loaded: LoadedConfig, pool: EnvPool, problem: Problem) -> list[dict[str, Any]]:
    seed, turns = derive_seed(loaded.config.training.seed, "probe", problem.id), loaded.config.environment.max_turns
    label = {"of": problem.environment} if problem.environment else {}
    rows: list[dict[str, Any]] = [{**label, "prompt": plain_text(problem.prompt)}]
    draw = Random(seed)
    random_replies = ("".join(draw.choices(_LETTERS, k=draw.randint(1, 12))) for _ in range(turns))
    kind_of_reply = "demonstrated reply" if problem.replies else "random reply"

    def replies() -> Iterator[str]:
        for reply in islice(problem.replies or random_replies, turns):
            rows.append({kind_of_reply: reply})
            yield reply

    for kind, text in text_episode(pool, problem.facts, seed, replies(), loaded.config.training.max_tokens):
        rows.append({kind: text})
    return rows if {"ended", "failed"} & set(rows[-1]) else [*rows, {"ended": f"not within {turns} turns"}]


def synthetic_batch(group_size: int, max_tokens: int) -> Batch:
    """Return 4 groups of random completions of different lengths, with the policy's columns.

    One group is all wrong, one all right, and in the others every second completion is right: what divides by the
    spread of a group's rewards fails here, and not in the first step with such a group.
    """
    draw = torch.Generator().manual_seed(0)
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


def _credit_and_loss(loaded: LoadedConfig) -> str:
    training, components = loaded.config.training, loaded.components
    batch = synthetic_batch(training.group_size, training.max_tokens)
    objective = components.objective(exact=False)
    needs_model = [
        stage.name
        for stage in components.pipeline.graph
        if stage.bound.component.stateful and not set(stage.bound.component.needs) <= set(_RUN_SCALARS)
    ]
    batch = batch.replace(**{name: _stand_in(name, batch) for name in needs_model})
    given = frozenset((*needs_model, *POLICY_COLUMNS))
    pipeline = Pipeline.resolve(components.stages(objective.signals), components.signal, given)
    pipeline.build(loaded.resources)
    pipeline.before(batch)
    batch, _ = pipeline.credit(batch)
    kept = float(pipeline.informative(batch)[0].float().mean())
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    columns = {name: batch.column(name) for name in objective.reads} | {"logprobs": logprobs}
    step = objective.step(batch)
    loss, _ = step.of(columns, step.weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return f"loss {loss.item():.4g}, gradient norm {gradient.norm().item():.4g}, {kept:.0%} of rows informative"


def _stand_in(name: str, batch: Batch) -> Any:
    """Return a substitute for a signal that needs the model: a mask if its name ends with _mask, else log-probs."""
    if name.endswith("_mask"):
        return batch.response_mask & (torch.arange(batch.response_mask.shape[1]) % 3 == 0)
    return batch.sampler_logprobs


def _rewards(loaded: LoadedConfig, problem: Problem) -> str:
    """Score the problem's worked solution, or else its bare answer, and return the rewards as text."""
    completion = problem.solution or problem.answer or "1"
    prompt, most = plain_text(problem.prompt), loaded.config.training.max_tokens
    item = completion_item(problem, prompt, completion, (0,), most, group=0)
    settings: dict[str, Any] = {**loaded.config.reward_pool.model_dump(), "workers": 1, "max_failed": 1.0}
    with RewardPool(loaded.rewards, search_paths=loaded.config.plugins.search_paths, **settings) as pool:
        # Two completions, because a reward that takes a batch must return a score for each.
        score = min(pool.score([item, item]), key=lambda one: one.status == "ok")
    parts = ", ".join(f"{name} = {value}" for name, value in score.parts.items())
    if score.status != "ok":
        shown = reprlib.repr(completion)
        raise ComponentError(f"{score.status}: {score.detail}", f"check its result for the completion {shown}")
    return parts


def attempt(action: Callable[[], Any]) -> Any:
    """Return the result of `action`, or "failed: ..." with the reason."""
    try:
        return action()
    except RetrainError as error:
        return f"failed: {error}"
    except Exception as error:  # user code may raise any exception; it is shown to the user
        return f"failed: {type(error).__name__}: {error}"


def _with_status(result: str) -> str:
    return result if result.startswith("failed") else f"ok: {result}"
