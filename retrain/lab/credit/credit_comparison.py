"""Comparison of the advantages that several modes assign to the completions in a file, without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.algorithms.graph.column_graph import hyper_of
from retrain.algorithms.graph.pipeline import Pipeline
from retrain.algorithms.graph.responses import padded, response_batch
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.errors import ComponentError, DataError
from retrain.functional.groups import group_mean
from retrain.registry import Component, find, names
from retrain.system.records import OBJECT, BadRow, Listed, checked, read_records
from retrain.tools.parameters import Parameters
from retrain.types import Batch

_LISTS = {"rewards": "reward", "corrects": "correct", "lengths": "length", "logprobs": "logprobs", "tokens": "tokens"}
_ROUNDING = 1e-4
"""Largest log-prob that is accepted; samplers round 0 up to small positive numbers."""
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _TurnSpan(TypedDict):
    """Start and end of a turn of an episode, in tokens."""

    start: Annotated[int, Field(ge=0)]
    end: int


class _ComparedRow(TypedDict, total=False):
    """Fields of a completion's row."""

    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    reward: _Finite
    correct: bool | Literal[0, 1]
    length: Annotated[int, Field(ge=0)]
    logprobs: Annotated[list[Annotated[_Finite, Field(le=_ROUNDING)]], Listed]
    sampler_logprobs: Annotated[list[Annotated[_Finite, Field(le=_ROUNDING)]], Listed]
    tokens: Annotated[list[str], Listed]
    turns: list[_TurnSpan]


T = TypeVar("T")
_ROW: TypeAdapter[_ComparedRow] = TypeAdapter(_ComparedRow)

SUMMARY = {
    "correct_above_0": "correct above 0 in mixed groups",
    "below_wrong": "correct below a wrong one",
    "length_correlation": "correlation with length",
    "zero": "without credit",
    "least": "least",
    "greatest": "greatest",
}
"""Columns of a summary with their headings."""


@dataclass(frozen=True)
class ComparedCompletion:
    """One completion of the file.

    Attributes:
        line: `file:line`, and in a row with lists the index in them, for errors.
        group: name of the group, which is all completions of one prompt.
        reward: any number.
        correct: the value in the file, or else reward > 0.5.
        length: number of response tokens.
        logprobs: one per sampled token, or None.
        tokens: text of every sampled token, or None.
    """

    line: str
    group: str
    reward: float
    correct: bool
    length: int
    logprobs: tuple[float, ...] | None = None
    tokens: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Credit:
    """Credit that a mode, with or without transforms, assigns to the completions.

    Attributes:
        name: the mode and its transforms.
        advantages: one per completion; with transforms the mean over its tokens.
        tokens: advantage of each token, one list per completion; None without transforms.
        planning: True for each planning token, in lists like `tokens`; None without transforms.
        summary: see `summarize`.
    """

    name: str
    advantages: list[float]
    tokens: list[list[float]] | None
    planning: list[list[bool]] | None
    summary: dict[str, float | None]


def read_completions(path: str) -> list[ComparedCompletion]:
    """Read completions from a file. A row is one completion, or one group with lists.

    The row of a completion has `group`, `reward` or `correct`, and `length`. It may have `logprobs` (or
    `sampler_logprobs`, like a run's rollouts) and `tokens`. The row of a group has lists: `rewards` or `correct`,
    `lengths`, `logprobs`, `tokens`. Its `group` is optional; the default is the row's place in the file.

    Raises:
        DataError: rows are invalid (the message lists all of them), or only some rows have log-probs.
    """
    completions = [completion for part in read_records(path, _parse) for completion in part]
    # A batch has one shape: without the log-probs of a row its token credit could not be computed.
    without = [completion.line for completion in completions if completion.logprobs is None]
    if without and len(without) < len(completions):
        raise DataError(f"{without[0]}: no logprobs, but other rows have them; add them to all rows or to none")
    return completions


def compare(
    completions: Sequence[ComparedCompletion],
    modes: Sequence[str],
    transforms: Sequence[str] = (),
    overrides: Sequence[str] = (),
    sepa_lambda: float = 1.0,
) -> list[Credit]:
    """Compute the credit of every mode, alone and with each transform, with the pipeline of training.

    Args:
        completions: at least one completion.
        modes: names or dotted paths of advantages.
        transforms: each is the name of a chain, a stage, or comma-separated stages.
        overrides: parameters, `table.key=value`.
        sepa_lambda: SEPA's pooling weight.
    Raises:
        ConfigError, ComponentError: names or parameters are invalid.
        DataError: there are transforms but no log-probs.
    """
    if transforms and completions[0].logprobs is None:
        raise DataError(f"{completions[0].line}: no logprobs, which --transform needs; add them or omit --transform")
    parameters = Parameters(overrides)
    batch, pieces = _batch(completions)
    batch = batch.replace(sepa_lambda=sepa_lambda)
    chains = [(), *(transform_chain(name.split(",") if "," in name else name) for name in transforms)]
    plans = [(mode, chain, _pipeline(parameters, mode, chain)) for mode in modes for chain in chains]
    # After all plans are bound, because a parameter may belong to the last of them.
    parameters.refuse_unread()
    credits_: list[Credit] = []
    for mode, chain, pipeline in plans:
        pipeline.build({"tokenizer": pieces, "search_paths": ()})
        credited, _ = pipeline.credit(batch)
        credits_.append(_credit(" + ".join((mode, *chain)), credited, completions, bool(chain)))
    return credits_


def summarize(advantages: Sequence[float], completions: Sequence[ComparedCompletion]) -> dict[str, float | None]:
    """Summarize the advantages of correct and wrong, long and short completions.

    Returns:
        Figures by name, None where one is undefined:
        correct_above_0: share of correct completions with a positive advantage, in groups with wrong completions.
        below_wrong: share of the same completions whose advantage is below that of a wrong one of their group.
        length_correlation: correlation of advantage and length within groups, among correct completions.
        zero: share of completions with advantage 0.
        least, greatest: smallest and largest advantage.
    """
    rows = list(zip(advantages, completions, strict=True))
    right = [(a, c) for a, c in rows if c.correct]
    best_wrong: dict[str, float] = {}
    for a, c in rows:
        if not c.correct:
            # One wrong answer with more credit than a right one suffices to teach the wrong.
            best_wrong[c.group] = max(a, best_wrong.get(c.group, -math.inf))
    # A group of correct completions alone has no credit to divide between right and wrong.
    mixed = [(a, best_wrong[c.group]) for a, c in right if c.group in best_wrong]
    return {
        "correct_above_0": _share([a > 0 for a, _ in mixed]),
        "below_wrong": _share([a < wrong for a, wrong in mixed]),
        "length_correlation": _within_groups(right),
        "zero": _share([a == 0 for a in advantages]),
        "least": min(advantages),
        "greatest": max(advantages),
    }


def figures(credit: Credit) -> list[str]:
    """Format a summary as texts, in the order of SUMMARY."""
    forms = [".0%" if key in ("correct_above_0", "below_wrong", "zero") else "+.2f" for key in SUMMARY]
    values = [credit.summary[key] for key in SUMMARY]
    return ["-" if value is None else f"{value:{form}}" for value, form in zip(values, forms, strict=True)]


def _parse(line: str, read: Any) -> list[ComparedCompletion]:
    row = checked(OBJECT, read)
    # A row of a group and a row of a completion may share the name `correct`; its type tells them apart.
    lists = isinstance(row.get("rewards", row.get("correct")), list)
    if not lists:
        return [_completion(line, str(row["group"]) if "group" in row else "", row)]
    # Other fields, such as the prompt, are one for the whole group.
    columns = {_LISTS.get(name, name): row[name] for name in row if name in (*_LISTS, "correct")}
    sizes = {name: len(column) if isinstance(column, list) else -1 for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise BadRow(f"lists of different lengths: {', '.join(f'{n} {size}' for n, size in sizes.items())}")
    count = next(iter(sizes.values()))
    if not count:
        raise BadRow(f"empty: no completion in {', '.join(sizes)}")
    group = str(row.get("group", line))
    return [
        _completion(f"{line}[{i}]", group, {name: column[i] for name, column in columns.items()}) for i in range(count)
    ]


def _completion(line: str, group: str, row: Mapping[str, Any]) -> ComparedCompletion:
    has = ", ".join(row) or "none"
    if not group:
        raise BadRow(f'no field "group"; it has {has}')
    if "reward" not in row and "correct" not in row:
        raise BadRow(f'no field "reward" or "correct"; it has {has}')
    columns = checked(_ROW, row)
    # A file with verdicts alone has the rewards of a verifier: 1 and 0.
    reward = columns.get("reward", float(columns.get("correct", 0)))
    turns = columns.get("turns", [])
    logprobs = _sampled(columns.get("sampler_logprobs", columns.get("logprobs")), turns)
    tokens = _sampled(columns.get("tokens"), turns)
    if "length" not in columns and logprobs is None:
        raise BadRow(f'no field "length"; it has {has}')
    length = columns.get("length", len(logprobs or ()))
    for name, values in (("logprobs", logprobs), ("tokens", tokens)):
        if values is not None and len(values) != length:
            raise BadRow(f"{len(values)} {name} for a length of {length}")
    return ComparedCompletion(
        *(line, group, reward, bool(columns.get("correct", reward > 0.5)), length),
        logprobs=None if logprobs is None else tuple(logprobs),
        tokens=None if tokens is None else tuple(tokens),
    )


def _sampled(values: list[T] | None, turns: Sequence[_TurnSpan]) -> list[T] | None:
    """Select the values of sampled tokens: in an episode of several turns, those inside turns."""
    # A single turn covers the whole completion.
    if values is None or len(turns) < 2:
        return values
    return [value for turn in turns for value in values[turn["start"] : turn["end"]]]


class _Pieces(list[str]):
    """Texts of the file's tokens as a vocabulary, with the method of a tokenizer that the planning detector calls."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self[index] for index in ids)


def _batch(completions: Sequence[ComparedCompletion]) -> tuple[Batch, _Pieces]:
    """Make a float64 batch of the completions without prompts, and its vocabulary.

    Completions without log-probs become one token wide.
    """
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(completion.group for completion in completions))
    }
    rewards = [completion.reward for completion in completions]
    correct = [completion.correct for completion in completions]
    # A row must have a token to carry its credit.
    logprobs = [(0.0,) if completion.logprobs is None else completion.logprobs for completion in completions]
    batch = response_batch(
        logprobs, rewards, correct, [numbers[completion.group] for completion in completions], torch.float64
    )
    pieces = _Pieces(
        # Padding has id 0, and its text must not look like a phrase of planning.
        dict.fromkeys(["a", *(text for completion in completions for text in completion.tokens or ())])
    )  # id 0 is padding
    ids = {text: number for number, text in enumerate(pieces)}
    if completions[0].logprobs is not None:
        tokens = [[ids[text] for text in completion.tokens or ()] for completion in completions]
        batch = batch.replace(input_ids=padded(tokens, batch.response_mask, torch.long))
    return batch.replace(
        lengths=torch.tensor([completion.length for completion in completions]),
        # The limit of the file's run is unknown; its longest completion is the best lower bound.
        max_tokens=max(completion.length for completion in completions),
        # No policy is there to recompute them, and before an update both are those of one policy.
        old_logprobs=batch.sampler_logprobs,
    ), pieces


def _pipeline(parameters: Parameters, mode: str, chain: Sequence[str]) -> Pipeline:
    def signal(column: str) -> Component | None:
        if column == "uncertainty":
            return find("uncertainty", "surprisal").bind()
        return parameters.bind("signal", column) if column in names("signal") else None

    pipeline = Pipeline.resolve(
        [parameters.bind("advantage", mode), *(parameters.bind("transform", name) for name in chain)],
        find("filter", "none").bind(),
        signal,
        observed=("planning_mask",) if chain else (),
        hyper=hyper_of(lambda name: parameters.bind("transform", name)),
        given=frozenset({"sepa_lambda", "old_logprobs"}),
    )
    if pipeline.policy_columns:
        raise ComponentError(
            f"{chain} read {', '.join(sorted(pipeline.policy_columns))}, which cannot be computed from log-probs",
            "see its credit in the report of a run, where the policy computes them",
        )
    return pipeline


def _credit(name: str, credited: Batch, completions: Sequence[ComparedCompletion], tokens: bool) -> Credit:
    sizes = credited.response_mask.sum(-1).tolist()
    rows = [row[:size].tolist() for row, size in zip(credited.advantages, sizes, strict=True)]
    # An advantage without transforms is the same at every token, and a mean would only add rounding.
    advantages = [sum(row) / max(len(row), 1) for row in rows] if tokens else [row[0] if row else 0.0 for row in rows]
    summary = summarize(advantages, completions)
    if not tokens:
        return Credit(name, advantages, None, None, summary)
    planning = [row[:size].tolist() for row, size in zip(credited.column("planning_mask"), sizes, strict=True)]
    return Credit(name, advantages, rows, planning, summary)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _within_groups(rows: Sequence[tuple[float, ComparedCompletion]]) -> float | None:
    """Correlation of advantage and length, both centered by group; None if either is constant."""
    if not rows:
        return None
    numbers = {name: number for number, name in enumerate({completion.group for _, completion in rows})}
    groups = torch.tensor([numbers[completion.group] for _, completion in rows])
    columns = ([advantage for advantage, _ in rows], [float(completion.length) for _, completion in rows])
    values = (torch.tensor(column, dtype=torch.float64) for column in columns)
    advantages, lengths = (column - group_mean(column, groups) for column in values)
    spread = float(advantages.norm() * lengths.norm())
    # Below it, one of the two is constant but for rounding, and the quotient would be any number.
    return float(advantages @ lengths) / spread if spread > 1e-12 else None
