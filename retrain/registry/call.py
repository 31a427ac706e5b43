"""Call components with checks. Errors name the component and show only the user's stack frames."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.errors import RetrainError, UserCodeError
from retrain.types import Metrics, fits_float32

if TYPE_CHECKING:
    from torch import Tensor

RESERVED = {
    *("step", "reward", "rollout", "tokens", "time", "groups", "advantage", "loss", "update", "grad", "optim"),
    *("mismatch", "parity", "sampler", "eval", "expert"),
}
"""Prefixes of the metric names that the run itself reports."""

_LIBRARIES = (
    *(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}/",
    # Frames of importlib, which a failed import adds.
    "<frozen",
)
"""Prefixes of the file names of stack frames that do not belong to the user's code."""
_LARGEST_COPY = 1 << 26
"""Maximum number of elements of a call's tensors that are copied to notice writes. Weights of a model have more."""
_MAX_TEXT = 500
"""Maximum number of characters of a value or exception message in an error."""


@dataclass(frozen=True)
class Call:
    """Context manager for a call of a component, and checks of its result.

    Attributes:
        kind: kind of the component.
        name: name of the component.
        where: text that error messages append to the name of the component.
    """

    kind: str
    name: str
    where: str = ""

    def fail(self, problem: str) -> UserCodeError:
        """Return an error that names the component.

        Args:
            problem: description of the fault, which continues the sentence after the name of the component.
        """
        return UserCodeError(f'{self.kind} "{self.name}"{self.where}: {problem}')

    @contextmanager
    def __call__(self, columns: Mapping[str, Any] | None = None) -> Generator[None]:
        """Guard a call of the component inside the block.

        RetrainError and Ctrl-C pass through unchanged.

        Args:
            columns: arguments of the component, by name.
        Raises:
            UserCodeError: the component raised an exception (its stack frames are added as a note),
                or modified one of the columns.
        """
        # Only tensors have `_version`. This module does not import torch.
        tensors = {name: value for name, value in (columns or {}).items() if hasattr(type(value), "_version")}
        copied = sum(value.numel() for value in tensors.values()) <= _LARGEST_COPY
        before = {name: _snapshot(value, copied) for name, value in tensors.items()}
        try:
            yield
        except (RetrainError, KeyboardInterrupt):
            raise
        except BaseException as error:
            failure = self.fail(f"raised {described(error)}")
            failure.add_note(own_frames(error))
            raise failure from error
        if written := [name for name, value in tensors.items() if _has_changed(before[name], value)]:
            raise self.fail(
                f"writes into {', '.join(written)}, which other components and the trainer also read; "
                "work on a copy (.clone()) and return it"
            )

    def split(self, result: Any) -> tuple[Any, Any]:
        """Split the result of a component, `value` or `(value, metrics)`, into value and metrics."""
        if not isinstance(result, tuple):
            return result, {}
        if len(result) != 2 or not isinstance(result[1], Mapping):
            raise self.fail(f"returned a tuple of {len(result)}, neither a value nor (value, dict of metrics)")
        return result

    def metrics(self, reported: Any) -> Metrics:
        """Check a component's metrics and return them as floats.

        Names must be valid and not used by the run; values must be finite. None counts as an empty dict.
        """
        if reported is None:
            return {}
        if not isinstance(reported, Mapping):
            raise self.fail(f"reported a {type(reported).__name__}, not a dict of metrics")
        return {self.free(name): self.number(value, f"metric {name!r}") for name, value in reported.items()}

    def free(self, name: Any) -> str:
        """Check the name of a metric and return it. It must be valid and not used by the run itself."""
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
            raise self.fail(f"{shown(name)} is not a valid name of a metric; use text such as {self.kind}/{self.name}")
        # "policy/" is shared with loss terms, but this one name is the run's.
        if name.partition("/")[0] in RESERVED or name == "policy/entropy":
            raise self.fail(f'the name of metric "{name}" is taken by the run; use another, such as "my/{name}"')
        return name

    def number(self, value: Any, what: str) -> float:
        """Convert a number to a float; raise an error that names it `what` if it is not a number."""
        # `float` would also convert text such as "1".
        if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
            raise self.fail(f"{what} is {shown(value)}, not a number")
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.fail(f"{what} is {shown(value)}, not a finite number") from error

    def numbers(self, values: Any, expected: int, what: str) -> list[float]:
        """Check that a component returned a list of finite numbers, and return them as floats.

        Args:
            values: the list; a tensor or an array is converted.
            expected: required length.
            what: name of the numbers for errors, in the plural.
        """
        values = values.tolist() if hasattr(type(values), "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise self.fail(f"{what} are a {type(values).__name__}, not a list of {expected} numbers")
        if len(values) != expected:
            raise self.fail(f"{len(values)} {what} for {expected}; return one for each")
        floats = [self.number(value, f"{what}[{index}]") for index, value in enumerate(values)]
        for index, value in enumerate(floats):
            if not fits_float32(value):
                raise self.fail(f"{what}[{index}] is {value}, not a finite number of float32")
        return floats

    def tensor(self, value: Any, shape: Sequence[int], like: Tensor) -> Tensor:
        """Check that a component returned a tensor, and return it.

        Args:
            value: the result.
            shape: required shape.
            like: tensor on the required device.
        """
        import torch

        if not isinstance(value, torch.Tensor):
            raise self.fail(f"returned {type(value).__name__}, not a tensor of {list(shape)}")
        if tuple(value.shape) != tuple(shape):
            raise self.fail(f"returned {list(value.shape)}, not a tensor of {list(shape)}")
        if value.device != like.device:
            raise self.fail(f"returned a tensor on {value.device}, but the batch is on {like.device}")
        return value


def _snapshot(value: Tensor, copied: bool) -> Tensor | int:
    """Return a copy of a tensor, or its version counter, which misses writes through `.numpy()` and `.data`."""
    if copied:
        return value.detach().clone()
    return 0 if value.is_inference() else value._version  # inference tensors have no counter


def _has_changed(before: Tensor | int, value: Tensor) -> bool:
    if isinstance(before, int):
        return before != _snapshot(value, False)
    # Columns may hold NaN outside of the mask.
    return before.shape != value.shape or not bool(before.isclose(value, rtol=0, atol=0, equal_nan=True).all())


def described(error: BaseException) -> str:
    """Format the type and message of an exception, with bounded length and without control characters."""
    return f"{type(error).__name__}: {_shorten(str(error))}"


def shown(value: Any) -> str:
    """Format a value for a message, with bounded length and without control characters."""
    return _shorten(repr(value))


def own_frames(error: BaseException) -> str:
    """Format the traceback of an exception without frames of this package and of libraries.

    If no other frames are left, the last frame is kept.
    """
    stack = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in stack if not frame.filename.startswith(_LIBRARIES)] or stack[-1:]
    # A recursion has a thousand frames; the last 20 name it.
    return "".join(traceback.format_list(user_frames[-20:])).rstrip()


def _shorten(text: str) -> str:
    """Limit the length of a text and replace control characters."""
    # A terminal would act on control characters.
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."
    return "".join(char if char.isprintable() else " " if char.isspace() else "·" for char in text)
