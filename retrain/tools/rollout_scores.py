"""Metrics of stored rollouts, alone or compared with a base on the same problems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from retrain.errors import DataError
from retrain.functional.evaluation import aes, mean_interval, paired_interval, pass_at_k, ratio_interval
from retrain.registry import find
from retrain.rewards.boxed_math import simple_equal
from retrain.rewards.pool import RewardPool
from retrain.system.records import BadRow, Listed, checked, read_records, refusal

Equivalence = Literal["recorded", "simple", "symbolic"]

_IDS = ("question_id", "index", "id")
"""Fields that can identify a problem; the first that a row has is used."""
_AnswerValue = str | int | float


class _ScoredRow(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # pyright: ignore[reportGeneralTypeIssues]
    predictions: Annotated[list[str], Listed, Field(min_length=1)]
    lengths: Annotated[list[Annotated[int, Field(ge=0)]], Listed]
    ground_truth: NotRequired[_AnswerValue]
    answer: NotRequired[_AnswerValue]
    correct: NotRequired[Annotated[list[bool], Listed]]


_ROW: TypeAdapter[Any] = TypeAdapter(_ScoredRow)


@dataclass(frozen=True)
class Result:
    """The rollouts of one problem.

    Attributes:
        line: `file:line` of the row.
        key: question_id, index or id of the row; "" if it has none.
        predictions: final answers or whole completions.
        lengths: number of tokens of each prediction.
        answer: the reference answer.
        recorded: the row's own `correct`; empty if it has none.
        right: True for each prediction that is equivalent to the reference answer.
        failed: number of predictions whose comparison timed out or raised an error; they count as wrong.
    """

    line: str
    key: str
    predictions: tuple[str, ...]
    lengths: tuple[int, ...]
    answer: str
    recorded: tuple[bool, ...] = ()
    right: tuple[bool, ...] = ()
    failed: int = 0

    def score(self, name: str) -> float:
        """Return a metric of this problem by name: pass@1, avg@n, avg_tokens or pass@K."""
        n, correct = len(self.right), sum(self.right)
        if name == "pass@1":
            return float(self.right[0])
        if name == "avg@n":
            return correct / n
        if name == "avg_tokens":
            return sum(self.lengths) / n
        return pass_at_k(n, correct, int(name.partition("@")[2]))


def results_file(path: Path, step: int | None = None, name: str = "") -> Path:
    """Return the stored evaluation of a run directory, or the path itself if it is a file.

    Args:
        path: run directory or file.
        step: number of training steps before the evaluation; None: the last evaluation.
        name: name of an evaluation set; "": the run's own held-out problems.
    Raises:
        DataError: the run has not stored this evaluation.
    """
    if not path.is_dir():
        return path
    ending = f"{name and f'.{name}'}.jsonl.gz"
    number = re.compile(r"step-(\d{6,})" + re.escape(ending))
    steps = {int(match[1]): file for file in path.glob("eval/*") if (match := number.fullmatch(file.name))}
    if steps and (step is None or step in steps):
        return steps[max(steps) if step is None else step]
    available = ", ".join(sorted(file.name for file in path.glob("eval/step-*.jsonl.gz")))
    fix = f"there are {available}" if available else "set [eval] problems, or give a file"
    wanted = f"eval/step-{'*' if step is None else f'{step:06d}'}{ending}"
    raise DataError(f"{path} has no stored evaluation {wanted}; {fix}")


def score_file(path: str, ks: Sequence[int] = (), equivalence: Equivalence = "recorded") -> list[Result]:
    """Read and judge a results file.

    Args:
        path: JSON lines with `predictions` (list or text), `lengths` (list or integer), and `ground_truth` or `answer`;
            also `correct`, if the predictions have been judged.
        ks: values of k for pass@k; every row needs at least as many rollouts as the largest of them.
        equivalence: "recorded" uses `correct` if a row has it, and else compares as "simple"; "simple" compares normal
            forms; "symbolic" also accepts answers that math-verify finds equal, in worker processes with a timeout.
    Raises:
        DataError: rows are invalid; the message lists them.
    """
    results = read_records(path, _parse)
    need = max(ks, default=1)
    counts = [(r.line, len(r.predictions)) for r in results]
    if bad := [f"{line}: pass@{need} needs {need} predictions, there are {n}" for line, n in counts if n < need]:
        raise refusal(bad, path, "; ask for a smaller k")
    return _judge(results, equivalence)


def summarize(results: Sequence[Result], ks: Sequence[int] = ()) -> dict[str, Any]:
    """Return the metrics over all problems, each as {value, low, high} with its 95% interval, and the counts."""
    shares = {name: mean_interval([r.score(name) for r in results]) for name in _shares(ks)}
    # Problems may have different numbers of predictions, so the mean length is a ratio of two sums.
    tokens = ratio_interval([float(sum(r.lengths)) for r in results], [len(r.lengths) for r in results])
    return {
        "problems": len(results),
        "rollouts": sum(len(r.predictions) for r in results),
        "failed": sum(r.failed for r in results),
        **{name: _interval(share) for name, share in shares.items()},
        "avg_tokens": _interval(tokens),
    }


def compare(results: Sequence[Result], base: Sequence[Result], ks: Sequence[int] = ()) -> dict[str, Any]:
    """Return the AES of the results against a base, and differences on the problems that both have.

    Returns:
        `aes` from pass@1 and `aes_avg` from avg@n, each with its two parts and its inputs; `pairs`: number of problems
        in both files; `unpaired`: number of problems in only one file; `paired`: mean difference per problem of every
        metric with its 95% interval.
    Raises:
        DataError: the files have no problem in common, or have different answers to the same problem.
    """
    ours, theirs = summarize(results), summarize(base)
    pairs = _pairs(results, base)
    names = (*_shares(ks), "avg_tokens")
    differences = {name: [ours.score(name) - theirs.score(name) for ours, theirs in pairs] for name in names}
    return {
        "aes": _aes("pass@1", ours, theirs),
        "aes_avg": _aes("avg@n", ours, theirs),
        "pairs": len(pairs),
        "unpaired": len(results) + len(base) - 2 * len(pairs),
        "paired": {name: _interval(paired_interval(values)) for name, values in differences.items()},
    }


def _parse(line: str, row: Any) -> Result:
    # Parquet gives every row all fields, with null for those that it lacks.
    given = {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row
    columns = checked(_ROW, given)
    predictions, lengths = columns["predictions"], columns["lengths"]
    if not isinstance(row["lengths"], list):  # a single number is the length of every prediction
        lengths = lengths * len(predictions)
    correct = columns.get("correct", ())
    for each, values in (("lengths", lengths), ("correct", correct or predictions)):
        if len(values) != len(predictions):
            raise BadRow(f"{len(values)} {each} for {len(predictions)} predictions; give one each")
    # A row with both is a stored evaluation, whose reference answer is ground_truth.
    name = "ground_truth" if "ground_truth" in columns else "answer"
    if name not in columns:
        raise BadRow(f'no field "ground_truth" or "answer"; it has {", ".join(row)}')
    key = next((str(row[name]) for name in _IDS if row.get(name) is not None), "")
    return Result(line, key, tuple(predictions), tuple(lengths), str(columns[name]), tuple(correct))


def _judge(results: Sequence[Result], equivalence: Equivalence) -> list[Result]:
    """Return the results with `right` and `failed`."""
    use_recorded = equivalence == "recorded"
    simple = [
        r.recorded if use_recorded and r.recorded else tuple(simple_equal(text, r.answer) for text in r.predictions)
        for r in results
    ]
    verdicts: dict[tuple[int, int], bool | None] = {}
    if equivalence == "symbolic":
        # Equal normal forms need no second opinion, which would cost a call of a worker.
        open_ = [(i, j) for i, right in enumerate(simple) for j, equal in enumerate(right) if not equal]
        pairs = [(results[i].predictions[j], results[i].answer) for i, j in open_]
        verdicts = dict(zip(open_, _symbolic(pairs), strict=True))
    judged: list[Result] = []
    for i, r in enumerate(results):
        right = tuple(equal or bool(verdicts.get((i, j))) for j, equal in enumerate(simple[i]))
        failed = sum(verdicts.get((i, j), False) is None for j in range(len(r.predictions)))
        judged.append(replace(r, right=right, failed=failed))
    return judged


def _symbolic(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Compare (prediction, answer) pairs with math-verify, each with a timeout; None for a comparison that failed."""
    if not pairs:
        return []
    reward = find("reward", "boxed_math").bind({"equivalence": "symbolic", "require_box": False, "value": False})
    # Only the text after the last #### is compared, as in the simple normal form.
    finals = [[text.rpartition("####")[2] for text in pair] for pair in pairs]
    items = [{"completion": completion, "answer": answer} for completion, answer in finals]
    # A comparison that fails is counted as wrong and reported, so all of them may fail.
    with RewardPool([(reward, 1.0)], max_failed=1.0) as pool:
        return [score.correct for score in pool.score(items)]


def _shares(ks: Sequence[int]) -> tuple[str, ...]:
    return ("pass@1", "avg@n", *(f"pass@{k}" for k in sorted(set(ks)) if k > 1))


def _interval(share: tuple[float, float | None, float | None]) -> dict[str, float | None]:
    return dict(zip(("value", "low", "high"), share, strict=True))


def _aes(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    used = [ours[name]["value"], theirs[name]["value"], ours["avg_tokens"]["value"], theirs["avg_tokens"]["value"]]
    value, length, accuracy = aes(*used)
    inputs = dict(zip(("accuracy", "base_accuracy", "tokens", "base_tokens"), used, strict=True))
    return {"value": value, "length_part": length, "accuracy_part": accuracy, "of": name, **inputs}


def _pairs(results: Sequence[Result], base: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Return the pairs of rows for the same problem, matched by id if all rows have one, else by position.

    Raises:
        DataError: there are no pairs, or the answers of a pair differ.
    """
    # One row without an id could be any problem, so that ids decide only if all rows have them.
    named = all(r.key for r in (*results, *base))
    ours, theirs = _keyed(results, named), _keyed(base, named)
    pairs = [(ours[key], theirs[key]) for key in ours if key in theirs]
    if not pairs:
        raise DataError(f"{results[0].line} and {base[0].line}: no problem in common; compare by {', '.join(_IDS)}")
    for pair, other in pairs:
        # Ids such as 0, 1, 2 of two data sets would pair different problems in silence.
        if not simple_equal(pair.answer, other.answer):
            raise DataError(
                f"{pair.line}: the answer is {pair.answer!r}, and {other.answer!r} in {other.line}; "
                "these are different problems: give the rows different ids"
            )
    return pairs


def _keyed(results: Sequence[Result], named: bool) -> dict[str, Result]:
    keyed: dict[str, Result] = {}
    for number, result in enumerate(results):
        key = result.key if named else f"row {number}"
        if keyed.setdefault(key, result) is not result:
            raise DataError(f"{result.line}: id {key!r} is taken by {keyed[key].line}; give every problem its own")
    return keyed
