"""Score the solutions in a file with an implicit process reward model that a run has saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.data.problem_store import prompt_hash
from retrain.data.rows import RowFormat, read_problems
from retrain.errors import ComponentError
from retrain.run.build import choose_device
from retrain.system.model_paths import positions
from retrain.system.records import OBJECT, BadRow, checked, read_object, refusal, rows_of
from retrain.training.layout import Layout
from retrain.training.model.forward import Forward
from retrain.training.model.loading import Loaded, load_model
from retrain.training.prm import FACTS, REFERENCE, pair_accuracy
from retrain.training.settings import PolicySettings
from retrain.training.warmup import demonstrations
from retrain.types import ExpertRow, Metrics, Problem

# Without an id field a problem's id is file:line, from which the scores take their line.
_READING = RowFormat(answer_field="solution", id_field="")
_POSITIVE = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class _Facts(TypedDict, total=False):
    """Settings that the run stored with the model; a model from elsewhere has none."""

    beta: _POSITIVE
    temperature: _POSITIVE


_FACTS: TypeAdapter[_Facts] = TypeAdapter(_Facts)
_VERDICT: TypeAdapter[bool | float | None] = TypeAdapter(bool | float | None, config=ConfigDict(strict=True))
_TEXTS = ("solution", "completion", "text")
_AT_ONCE = 256
"""Number of rows in one batch."""


@dataclass(frozen=True)
class ScoredRow:
    """The scores of one solution.

    Attributes:
        line: line of the file.
        r_phi: sum of the rewards of its tokens.
        mean: mean reward per token.
        length: number of its tokens, end-of-sequence included.
        correct: label in the file; None without one.
        prompt: hash of the prompt.
        rewards: (text, reward) of every token.
    """

    line: int
    r_phi: float
    mean: float
    length: int
    correct: bool | None
    prompt: str
    rewards: tuple[tuple[str, float], ...]

    def facts(self, tokens: bool) -> dict[str, Any]:
        """Return the scores as a JSON row; with `tokens`, including the reward of every token."""
        row = {"line": self.line, "r_phi": self.r_phi, "mean": self.mean, "length": self.length}
        correctness = {} if self.correct is None else {"correct": self.correct}
        return row | correctness | ({"tokens": [list(pair) for pair in self.rewards]} if tokens else {})


def score_file(path: Path, model: str, reference: str | None = None, beta: float | None = None) -> list[ScoredRow]:
    """Score every solution in a jsonl file: r_phi = sum over tokens of beta * (log phi - log ref).

    Rows are `{"prompt": ..., "solution" | "completion" | "text": ...}`, or `{"messages": [...]}` whose last message is
    the assistant's. A solution is labelled correct by `correct`, or by a `reward` above 0.5.

    Args:
        path: the file.
        model: directory of the process reward model, or its name on the hub.
        reference: the reference model; None: the directory `reference` in the model's directory.
        beta: scale of the rewards; None: the one used in training, or 0.05 if that is unknown.
    Raises:
        DataError: rows are invalid or too long for the model; the message names file and line.
        ComponentError: there is no reference, or its tokenizer differs.
        StorageError: the settings stored with the model are damaged.
    """
    problems = read_problems(map(_as_solution, rows_of(path)), str(path), _READING)
    facts = read_object(Path(model) / FACTS, _FACTS)
    settings = PolicySettings(temperature=facts.get("temperature", 1.0))
    phi, ref = _models(model, reference)
    scale = facts.get("beta", 0.05) if beta is None else beta
    rows = demonstrations(phi.chat, problems)
    most = positions(phi.model)
    lengths = [(problem.id, len(row.ids)) for problem, row in zip(problems, rows, strict=True)]
    # All rows are checked before the first forward pass, so that no work is lost to a row at the end.
    if bad := [f"{name}: {length} tokens; the model takes {most}" for name, length in lengths if length > most]:
        raise refusal(bad, path, ": remove them")
    forwards = Forward(phi.model, settings), Forward(ref.model, settings)
    return [
        row
        for first in range(0, len(rows), _AT_ONCE)
        for row in _scored(phi, problems[first:][:_AT_ONCE], rows[first:][:_AT_ONCE], forwards, scale)
    ]


def summary(rows: Sequence[ScoredRow]) -> Metrics:
    """Return the number of rows, the mean of r_phi, and the accuracy over pairs.

    A pair consists of a correct and a wrong solution of the same prompt. Without pairs there is no accuracy.
    """
    judged = [row for row in rows if row.correct is not None]
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(row.prompt for row in judged))}
    pairwise = pair_accuracy(
        torch.tensor([row.r_phi for row in judged], dtype=torch.float64),
        torch.tensor([bool(row.correct) for row in judged], dtype=torch.bool),
        torch.tensor([prompts[row.prompt] for row in judged], dtype=torch.int64),
    )
    accuracy = {name.removeprefix("prm/"): value for name, value in pairwise.items()}
    return {"rows": float(len(rows)), "r_phi_mean": sum(row.r_phi for row in rows) / len(rows)} | accuracy


def _scored(
    phi: Loaded, problems: Sequence[Problem], rows: Sequence[ExpertRow], forwards: tuple[Forward, Forward], beta: float
) -> Iterator[ScoredRow]:
    """Yield the scores of rows; `forwards` compute the log-probs of model and reference."""
    batch = Layout(pad_id=0, device=phi.model.device, max_tokens=0).batch([], 0, rows)
    # double: the difference of two log-probs of many tokens is summed.
    policy, other = (forward.logprobs(batch)["old_logprobs"].double() for forward in forwards)
    for problem, row, values in zip(problems, rows, (beta * (policy - other)).tolist(), strict=True):
        [(start, end)] = row.spans
        rewards, tokenizer = values[start:end], cast("Any", phi.tokenizer)
        # Token by token, because rewards belong to tokens and a joint decoding merges them.
        texts = [tokenizer.decode([id_]) for id_ in row.ids[start:end]]
        yield ScoredRow(
            line=int(problem.id.rpartition(":")[2]),
            r_phi=sum(rewards),
            mean=sum(rewards) / len(rewards),
            length=len(rewards),
            correct=_correct(problem.extra),
            prompt=prompt_hash(problem),
            rewards=tuple(zip(texts, rewards, strict=True)),
        )


def _as_solution(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return a row in the form that `read_problems` reads, with a prompt and a solution; BadRow for an invalid row."""
    line, row = item
    try:
        values = checked(OBJECT, row)
        _correct(values)
        return line, {**values, **_parts(values)}
    except BadRow as reason:
        return line, reason


def _parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt and solution of a row, or only the solution if the row has a field for the prompt."""
    messages = values.get("messages")
    if "prompt" not in values and isinstance(messages, list) and messages:
        *prompt, last = cast("list[Any]", messages)
        # Only an answer of the model can be scored, with all messages before it as the prompt.
        if not isinstance(last, Mapping) or cast("Mapping[str, Any]", last).get("role") != "assistant":
            raise BadRow("messages must end with the assistant's")
        return {"prompt": prompt, "solution": cast("Mapping[str, Any]", last).get("content")}
    for name in _TEXTS:
        if values.get(name) is not None:
            return {"solution": values[name]}
    raise BadRow(f"no field {', '.join(_TEXTS)}; it has {', '.join(values) or 'none'}")


def _correct(values: Mapping[str, Any]) -> bool | None:
    """Return the label of a row's solution; None without one. Raises BadRow for an invalid label."""
    # A verdict outranks a reward, which may have parts for length or format.
    name = "reward" if values.get("correct") is None else "correct"
    try:
        value = checked(_VERDICT, values.get(name))
    except BadRow as reason:
        raise BadRow(f"{name}: {reason}") from None
    return value if value is None or (isinstance(value, bool) and name == "correct") else value > 0.5


def _models(model: str, reference: str | None) -> tuple[Loaded, Loaded]:
    """Load the process reward model and its reference."""
    other = reference or str(Path(model) / REFERENCE)
    if reference is None and not Path(other).is_dir():
        raise ComponentError(f"{model} has no folder {REFERENCE}", "name the initial policy with --reference")
    device = choose_device("auto")
    phi, ref = load_model(model), load_model(other)
    vocabulary, theirs = cast("tuple[Any, Any]", (phi.tokenizer, ref.tokenizer))
    # Log-probs of different tokens cannot be subtracted.
    if vocabulary.get_vocab() != theirs.get_vocab():
        raise ComponentError(
            f"{other} and {model} have different tokenizers", "name the model from which this one was trained"
        )
    for loaded in (phi, ref):
        cast("Any", loaded.model).to(device)
    return phi, ref
