"""Base class and field types of sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Strict and immutable model: no type conversions, unknown keys, NaN or infinity."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Array = Field(strict=False)  # TOML has lists only; the frozen models hold tuples
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Problems = Annotated[int, Field(ge=0, le=1_000_000)]
"""Number of problems that are created and held in memory before training begins."""
# TOML integers have 64 bits, one of them for the sign.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Params = dict[str, Any]
