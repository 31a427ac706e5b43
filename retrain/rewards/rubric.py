"""Rubrics: criteria with weights, from the TOML and from a column of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NotRequired, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from retrain.functional.templates import column
from retrain.system.records import BadRow, checked


def _written(text: str) -> str:
    if not text.strip():
        raise ValueError("empty")
    return text


def _not_zero(weight: float) -> float:
    if weight == 0:
        raise ValueError("a weight of 0 has no effect; leave the criterion out")
    return weight


class Criterion(TypedDict):
    """A criterion of a rubric, as written in the run file or in the data. A text is short for {"criterion": text}."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # pyright: ignore[reportGeneralTypeIssues] - pydantic's way

    criterion: Annotated[str, AfterValidator(_written)]
    weight: NotRequired[Annotated[float, AfterValidator(_not_zero)]]
    name: NotRequired[str]


def _as_table(value: Any) -> Any:
    """Convert a text to a table, and remove null fields, which columns of parquet files have."""
    if isinstance(value, str):
        return {"criterion": value}
    if isinstance(value, Mapping):
        return {key: inner for key, inner in cast("Mapping[Any, Any]", value).items() if inner is not None}
    return value


Item = Annotated[Criterion, BeforeValidator(_as_table, json_schema_input_type=Criterion | str)]
_COLUMN: TypeAdapter[dict[str, list[Criterion]]] = TypeAdapter(dict[str, list[Item]])


class Weighted(NamedTuple):
    """A criterion with defaults filled in.

    Attributes:
        text: the criterion.
        weight: its weight in the score.
        name: part of the reward to which its score belongs; "" for none.
    """

    text: str
    weight: float
    name: str


class Rubric(NamedTuple):
    """Settings that determine the criteria of a row.

    Attributes:
        fixed: criteria for every row.
        field: column with further criteria for the row, dotted if it is nested; None for none.
        parts: names that criteria of this column must have, with the weight of each name in `reward_parts`. If it is
            empty, these criteria may have any names.
    """

    fixed: Sequence[Criterion] = ()
    field: str | None = None
    parts: Mapping[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.fixed) or self.field is not None

    def named(self) -> list[Weighted]:
        """Return the fixed criteria; those without a name are called criterion_1, criterion_2, ..."""
        return [
            Weighted(criterion["criterion"], criterion.get("weight", 1.0), criterion.get("name", f"criterion_{number}"))
            for number, criterion in enumerate(self.fixed, 1)
        ]

    def of(self, row: Mapping[str, Any]) -> list[Weighted]:
        """Return the criteria of a row of data; an empty list if the rubric has none.

        Raises:
            BadRow: the column is missing or invalid, or there are criteria but none has a positive weight.
        """
        criteria = self.named()
        if self.field is not None:
            if not (cells := column(row, self.field)):
                raise BadRow(f'no field "{self.field}", the rubric_field; it has {", ".join(row) or "none"}')
            listed = checked(_COLUMN, {self.field: cells[0]})[self.field]
            criteria += [self._weighted(criterion, f"{self.field}[{index}]") for index, criterion in enumerate(listed)]
        if criteria and not any(criterion.weight > 0 for criterion in criteria):
            raise BadRow("the rubric has no criterion with a positive weight")
        return criteria

    def _weighted(self, criterion: Criterion, where: str) -> Weighted:
        """Convert a criterion of the column; raise BadRow if its name is not one of `parts`."""
        name = criterion.get("name", "")
        if self.parts and name not in self.parts:
            what = f'the name "{name}"' if name else "no name"
            raise BadRow(f"{where} has {what}; parts names {', '.join(self.parts)}")
        return Weighted(criterion["criterion"], criterion.get("weight", 1.0), name if self.parts else "")

    def columns(self) -> dict[str, float]:
        """Return the weights of the parts in the reward, by name; {} if some criteria belong to no part.

        If all criteria are fixed, the weighted sum of the parts is the reward.
        """
        if self.field is not None and not self.parts:
            return {}
        parts: dict[str, float] = {}
        for criterion in self.named():
            parts[criterion.name] = parts.get(criterion.name, 0.0) + abs(criterion.weight)
        # Faults lower the sum, but the best possible sum is that of the positive weights.
        total = sum(max(criterion.weight, 0.0) for criterion in self.named()) + sum(self.parts.values())
        # Without a positive weight the rubric is refused elsewhere; here nothing may be divided by 0.
        return {name: weight / (total or 1.0) for name, weight in {**parts, **self.parts}.items()}


def reward_of(criteria: Sequence[Weighted], scores: Sequence[float]) -> dict[str, float]:
    """Return the score of a completion and the parts by name.

    score = sum_k w_k s_k / sum_{k: w_k > 0} w_k;  part c = sum_{k of name c} w_k s_k / sum_{k of name c} |w_k|

    Args:
        criteria: the criteria; at least one weight w_k is positive.
        scores: s_k in [0, 1]: 1 if the criterion is fully met.
    """
    pairs = [*zip(criteria, scores, strict=True)]
    positive = sum(criterion.weight for criterion in criteria if criterion.weight > 0)
    values = {"score": sum(criterion.weight * score for criterion, score in pairs) / positive}
    for name in dict.fromkeys(criterion.name for criterion in criteria if criterion.name):
        scored = [(criterion.weight, score) for criterion, score in pairs if criterion.name == name]
        values[name] = sum(weight * score for weight, score in scored) / sum(abs(weight) for weight, _ in scored)
    return values
