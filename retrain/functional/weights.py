"""Full weights of a model by name, gathered or merged one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

ParameterReader = Callable[[str], Tensor]
"""Reads the full tensor of a parameter by its name.

If weights are sharded, all ranks must read the same ones in the same order.
"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank (LoRA) update of one matrix W [out, in]: up @ down, in float32.

    Attributes:
        up: [out, r], multiplied by the scale alpha / r.
        down: [r, in].
        transposed: the state dict stores W as [in, out], like embeddings and the layers of GPT-2.
    """

    up: Tensor
    down: Tensor
    transposed: bool = False

    def added(self, weight: Tensor) -> Tensor:
        """Return W + up @ down in float32, in the layout of `weight`.

        In bfloat16 an update much smaller than W would be lost.
        """
        update = self.up @ self.down
        return weight.float() + (update.T if self.transposed else update)


class LazyWeights(Mapping[str, "Tensor"]):
    """A full state dict whose tensors are computed one at a time, on access.

    Sharded tensors are gathered, 4-bit matrices are dequantized, and LoRA updates are merged in float32. When
    tensors are gathered, every rank must read the same names in the same order. An engine that computes in a lower
    precision than float32 should read `frozen` and `updates` and add their products, because merging loses updates
    that are smaller than the rounding errors of the weights.

    Args:
        held: name -> tensor in this process; tied names share one object.
        read: function that returns the whole tensor of a name. None means that `held` has whole tensors.
        shapes: shapes of the whole tensors. None means those of `held`.
        updates: name of an adapted matrix -> its LoRA update.
        rank: rank of this process.

    Attributes:
        held: see Args.
        updates: see Args; empty without LoRA.
        rank: see Args.
        lazy: True if reading a tensor gathers or dequantizes it.
    """

    def __init__(
        self,
        held: Mapping[str, Tensor],
        read: Callable[[str], Tensor] | None = None,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        updates: Mapping[str, LowRank] | None = None,
        rank: int = 0,
    ) -> None:
        self.held, self.updates, self.rank = held, updates or {}, rank
        self.lazy = read is not None
        self._read = read or held.__getitem__
        self._shapes = shapes

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole tensors, without reading any."""
        return self._shapes or {name: tuple(value.shape) for name, value in self.held.items()}

    @cached_property
    def untied(self) -> list[str]:
        """Names of the tensors, without those that are tied to an earlier name."""
        # Reversed, so that of tied names the first one remains in the dict.
        first = {id(value): name for name, value in reversed([*self.held.items()])}
        return [name for name, value in self.held.items() if first[id(value)] == name]

    def frozen(self, name: str) -> Tensor:
        """Return the whole tensor without its LoRA update, in its own dtype."""
        if name not in self.held:  # raised before the ranks communicate, which would hang
            raise KeyError(name)
        return self._read(name)

    def read_by(self, read: Callable[[str], Tensor]) -> LazyWeights:
        """Return the same weights with another function that reads a tensor."""
        return LazyWeights(self.held, read, shapes=self.shapes, updates=self.updates, rank=self.rank)

    def adapted(self, updates: Mapping[str, LowRank]) -> LazyWeights:
        """Return the same weights with these LoRA updates."""
        read = self._read if self.lazy else None
        return LazyWeights(self.held, read, shapes=self._shapes, updates=updates, rank=self.rank)

    def __getitem__(self, name: str) -> Tensor:
        weight, update = self.frozen(name), self.updates.get(name)
        return weight if update is None else update.added(weight)

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def as_lazy(weights: Mapping[str, Tensor]) -> LazyWeights:
    """Return a state dict as `LazyWeights`."""
    return weights if isinstance(weights, LazyWeights) else LazyWeights(weights)
