"""Calling conventions of rewards, by signature: our names, TRL's, or verl's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from retrain.errors import ComponentError
from retrain.registry import Component

FIELDS: tuple[str, ...] = (
    *("completion", "answer", "prompt", "problem", "length", "max_tokens", "finish_reason", "completion_ids"),
)
"""Names that a reward may read: completion and answer are text; prompt is the rendered text; problem
is a dict with id, prompt, answer and extra; length and max_tokens are counts of tokens; finish_reason is
"stop" or "length"; completion_ids are token ids."""
GROUP = "group"
"""Parameter of a reward that compares: all completions of a prompt, each a dict of FIELDS."""

_TRL = ("prompts", "completions", "completion_ids")
_TRL_HOOKS = ("log_extra", "log_metric", "trainer_state")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_REQUIRED = inspect.Parameter.empty


class Form(NamedTuple):
    """Calling convention of a reward.

    Attributes:
        name: "retrain", "group", "trl", "verl" or "verl_batch".
        reads: the FIELDS that its arguments are made from, or GROUP alone.
        names: its positional parameters, less `self`; `required` has those without a default.
        open: it takes **columns.
        is_async: it is a coroutine function.
    """

    name: str
    reads: tuple[str, ...]
    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    is_async: bool

    @property
    def batch(self) -> bool:
        """Return whether one call scores many completions."""
        return self.name in ("trl", "verl_batch")

    def described(self) -> str:
        """The form in words, for `explain`."""
        said = {
            "retrain": "by the names of its parameters, one completion at a time",
            "group": "once for each prompt, with the list of its completions",
            "trl": "as TRL calls a reward function: lists of prompts, completions and columns of the data",
            "verl": "as verl calls compute_score, one completion at a time",
            "verl_batch": "as verl calls a batched compute_score: lists of data_sources, solution_strs ...",
        }[self.name]
        return f"{said}; async" if self.is_async else said

    def arguments(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Keyword arguments of one call: for all items if it takes a batch, else for the first.

        Raises:
            ValueError: a column that it names is not in the data.
        """
        if self.name in ("retrain", "group"):
            return {name: items[0][name] for name in self.reads}
        rows = [self._row(item) for item in items]
        names = dict.fromkeys(name for row in rows for name in row)
        found: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        if self.name == "trl":
            found |= dict.fromkeys(name for name in _TRL_HOOKS if name in self.names)
            found |= {name: _ignore for name in _TRL_HOOKS[:2] if name in self.names}
        if lacking := [name for name in self.required if name not in found]:
            has = ", ".join(found)
            raise ValueError(f"it reads {', '.join(lacking)}, which the rows of the data do not have; they have {has}")
        given = {name: values for name, values in found.items() if self.open or name in self.names}
        return {name: values[0] for name, values in given.items()} if self.name == "verl" else given

    def _row(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of one completion, by this form's names."""
        problem = item["problem"]
        extra = cast("Mapping[str, Any]", problem["extra"])
        if self.name == "trl":
            chat = isinstance(problem["prompt"], list)
            completion = [{"role": "assistant", "content": item["completion"]}] if chat else item["completion"]
            ids = {"completion_ids": list(item["completion_ids"])} if "completion_ids" in item else {}
            columns = {"answer": problem["answer"], **extra}
            return {**columns, "prompts": problem["prompt"], "completions": completion, **ids}
        stated: Any = extra.get("reward_model")
        truth = stated.get("ground_truth", item["answer"]) if isinstance(stated, dict) else item["answer"]
        values = (extra.get("data_source", ""), item["completion"], truth, extra.get("extra_info") or {})
        return dict(zip(_VERL if self.name == "verl" else _VERL_BATCH, values, strict=True))


def _ignore(*_: Any, **__: Any) -> None:
    """TRL's logger arguments, which are accepted and ignored."""


def form_of(component: Component) -> Form:
    """Return the form of a reward; ComponentError if it needs an argument of no form."""
    target: Any = component.target
    called = target.__call__ if component.stateful else target
    parameters = dict(inspect.signature(called).parameters)
    names = component.reads
    required = tuple(name for name in names if parameters[name].default is _REQUIRED)
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    # A coroutine function may be wrapped in functools.partial or a closure.
    is_async = inspect.iscoroutinefunction(inspect.unwrap(called))
    if "completions" in names or ("completion_ids" in names and "completion" not in names):
        name, reads = "trl", ("completion", "answer", "problem")
        reads += ("completion_ids",) if "completion_ids" in names else ()
    elif "solution_str" in names or "solution_strs" in names:
        name, reads = "verl" if "solution_str" in names else "verl_batch", ("completion", "answer", "problem")
        _refuse(component, [one for one in required if one not in (*_VERL, *_VERL_BATCH)], "verl")
    elif GROUP in names:
        name, reads = "group", (GROUP,)
        _refuse(component, [one for one in required if one != GROUP], "group")
    else:
        name, reads = "retrain", tuple(one for one in names if one in FIELDS)
        _refuse(component, [one for one in required if one not in FIELDS])
        if not reads and is_open:
            raise ComponentError(
                f'reward "{component.name}" takes only **keywords, and would be called with nothing',
                f"name its parameters among: {', '.join(FIELDS)}",
            )
    if any(parameters[one].kind is inspect.Parameter.POSITIONAL_ONLY for one in names if one in (*reads, *required)):
        problem = f'reward "{component.name}" takes positional-only parameters'
        raise ComponentError(problem, "drop the / of its signature")
    return Form(name, reads, names, required, is_open, is_async)


def _refuse(component: Component, unknown: Sequence[str], caller: str = "") -> None:
    if unknown:
        fix = {
            "": f"name its parameters among: {', '.join(FIELDS)}; or {GROUP} alone; or write it as TRL does, "
            "(completions, **columns), or as verl does, (data_source, solution_str, ...)",
            "verl": f"verl gives {', '.join(_VERL)}",
            "group": f"read them from the dicts in {GROUP}: {', '.join(FIELDS)}",
        }[caller]
        raise ComponentError(f'reward "{component.name}" reads {", ".join(unknown)}, which no completion has', fix)
