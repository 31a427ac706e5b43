"""Calling conventions of rewards, recognised by the signature: those of this package, TRL and verl."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from retrain.errors import ComponentError
from retrain.registry import Component
from retrain.types import Problem

FIELDS: tuple[str, ...] = (
    *("completion", "answer", "prompt", "problem", "length", "max_tokens", "finish_reason", "completion_ids"),
)
"""Names of the parameters that a reward can have. `completion` and `answer` are texts. `prompt` is the
rendered text. `problem` is a dict with id, prompt, answer and extra. `length` and `max_tokens` are
numbers of tokens. `finish_reason` is "stop" or "length". `completion_ids` are token ids."""
GROUP = "group"
"""Parameter of a reward that compares completions: a list of all completions of a prompt, as dicts of FIELDS."""

_TRL = ("prompts", "completions", "completion_ids")
_TRL_HOOKS = ("log_extra", "log_metric", "trainer_state")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_REQUIRED = inspect.Parameter.empty


class Form(NamedTuple):
    """Calling convention of a reward.

    Attributes:
        name: "retrain", "group", "trl", "verl" or "verl_batch".
        reads: the FIELDS from which its arguments are derived, or only GROUP.
        names: names of its positional parameters, without `self`.
        required: names of its positional parameters that have no default.
        open: True if it accepts any keyword arguments (**columns).
        is_async: True if it is a coroutine function.
    """

    name: str
    reads: tuple[str, ...]
    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    is_async: bool

    @property
    def batch(self) -> bool:
        """True if one call scores a batch of completions."""
        return self.name in ("trl", "verl_batch")

    def described(self) -> str:
        """Describe the calling convention, for `retrain explain`."""
        text = {
            "retrain": "by the names of its parameters, one completion at a time",
            "group": "once for each prompt, with the list of its completions",
            "trl": "as TRL calls a reward function: lists of prompts, completions and columns of the data",
            "verl": "as verl calls compute_score, one completion at a time",
            "verl_batch": "as verl calls a batched compute_score: lists of data_sources, solution_strs ...",
        }[self.name]
        return f"{text}; async" if self.is_async else text

    def arguments(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the keyword arguments of one call.

        Args:
            items: the completions, as mappings from names in FIELDS to values. Only the first is used
                if the reward does not take a batch.
        Raises:
            ValueError: the rows of the data lack a column that the reward requires.
        """
        if self.name in ("retrain", "group"):
            return {name: items[0][name] for name in self.reads}
        rows = [self._row(item) for item in items]
        names = dict.fromkeys(name for row in rows for name in row)
        columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        if self.name == "trl":
            columns |= dict.fromkeys(name for name in _TRL_HOOKS if name in self.names)
            # The first two are called, the state is only read.
            columns |= {name: _ignore for name in _TRL_HOOKS[:2] if name in self.names}
        if lacking := [name for name in self.required if name not in columns]:
            has = ", ".join(columns)
            raise ValueError(f"it reads {', '.join(lacking)}, but the rows of the data only have {has}")
        arguments = {name: values for name, values in columns.items() if self.open or name in self.names}
        return {name: values[0] for name, values in arguments.items()} if self.name == "verl" else arguments

    def _row(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values for one completion, by the parameter names of this convention."""
        problem = item["problem"]
        extra = cast("Mapping[str, Any]", problem["extra"])
        if self.name == "trl":
            chat = isinstance(problem["prompt"], list)
            completion = [{"role": "assistant", "content": item["completion"]}] if chat else item["completion"]
            ids = {"completion_ids": list(item["completion_ids"])} if "completion_ids" in item else {}
            columns = {"answer": problem["answer"], **extra}
            return {**columns, "prompts": problem["prompt"], "completions": completion, **ids}
        stated: Any = extra.get("reward_model")
        answer = stated.get("ground_truth", item["answer"]) if isinstance(stated, dict) else item["answer"]
        # verl's own data has the answer in `reward_model`, and other rows in their answer column.
        values = (extra.get("data_source", ""), item["completion"], answer, extra.get("extra_info") or {})
        return dict(zip(_VERL if self.name == "verl" else _VERL_BATCH, values, strict=True))


def _ignore(*_: Any, **__: Any) -> None:
    """Accept any arguments and do nothing, in place of TRL's logging functions."""


def completion_item(
    problem: Problem, prompt: str, completion: str, ids: Sequence[int], max_tokens: int, group: int
) -> dict[str, Any]:
    """Return a completion as the pool takes it: its FIELDS, as if all `ids` were sampled, and the number of its group.

    Args:
        prompt: the rendered text.
    """
    return {
        "completion": completion,
        "answer": problem.answer,
        "prompt": prompt,
        "problem": problem.facts,
        "length": len(ids),
        "max_tokens": max_tokens,
        "finish_reason": "stop",
        "completion_ids": tuple(ids),
        GROUP: group,
    }


def form_of(component: Component) -> Form:
    """Return the calling convention of a reward.

    Raises:
        ComponentError: the reward has a required parameter that its convention does not provide, or takes
            positional-only parameters or only **keywords.
    """
    target: Any = component.target
    called = target.__call__ if component.stateful else target
    parameters = dict(inspect.signature(called).parameters)
    names = component.reads
    required = tuple(name for name in names if parameters[name].default is _REQUIRED)
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    # A coroutine function may be wrapped in functools.partial or a closure.
    is_async = inspect.iscoroutinefunction(inspect.unwrap(called))
    # TRL gives every reward prompts and completions, so one that reads neither must accept **kwargs.
    if "completions" in names or ("completion_ids" in names and "completion" not in names and is_open):
        name, reads = "trl", ("completion", "answer", "problem")
        reads += ("completion_ids",) if "completion_ids" in names else ()
    elif "solution_str" in names or "solution_strs" in names:
        name, reads = "verl" if "solution_str" in names else "verl_batch", ("completion", "answer", "problem")
        _refuse(component, [name for name in required if name not in (*_VERL, *_VERL_BATCH)], "verl")
    elif GROUP in names:
        name, reads = "group", (GROUP,)
        _refuse(component, [name for name in required if name != GROUP], "group")
    else:
        name, reads = "retrain", tuple(field for field in names if field in FIELDS)
        _refuse(component, [name for name in required if name not in FIELDS])
        if not reads and is_open:
            raise ComponentError(
                f'reward "{component.name}" takes only **keywords, and would be called with nothing',
                f"name its parameters among: {', '.join(FIELDS)}",
            )
    passed = [parameters[parameter].kind for parameter in names if parameter in (*reads, *required)]
    if inspect.Parameter.POSITIONAL_ONLY in passed:
        problem = f'reward "{component.name}" takes positional-only parameters'
        raise ComponentError(problem, "drop the / of its signature")
    return Form(name, reads, names, required, is_open, is_async)


def _refuse(component: Component, unknown: Sequence[str], caller: str = "") -> None:
    """Raise ComponentError if a reward has unknown required parameters.

    Args:
        component: the reward.
        unknown: its required parameters that the calling convention does not provide.
        caller: key of the fix: "verl", "group", or "" for the parameters of this package.
    """
    if unknown:
        fix = {
            "": f"name its parameters among: {', '.join(FIELDS)}; or {GROUP} alone; or write it as TRL does, "
            "(completions, **columns), or as verl does, (data_source, solution_str, ...)",
            "verl": f"verl gives {', '.join(_VERL)}",
            "group": f"read them from the dicts in {GROUP}: {', '.join(FIELDS)}",
        }[caller]
        raise ComponentError(f'reward "{component.name}" reads {", ".join(unknown)}, which no completion has', fix)
