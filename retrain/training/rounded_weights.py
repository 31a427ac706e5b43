"""Trained weights that are bfloat16 numbers, with float32 masters beside them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from retrain.functional.rounding import stochastic
from retrain.functional.seeds import derive_seed
from retrain.training.shards import is_sharded, like, local


class RoundedWeights:
    """Rounds every parameter of a model at random once per step: what computes, samples and is saved is the same.

    The optimizer moves float32 masters. An update that is smaller than a weight's last digit then moves the rounded
    weight with a probability, where rounding to nearest would lose it. The random numbers of a step derive from the
    seed, the step and the parameter's name, so that ranks which hold the same weights round them alike, and a resumed
    run rounds as the uninterrupted one.

    Args:
        parameters: by name; they are rounded at once, for step 0.
        seed: of the named sub-streams.
        rank: this process, whose rows of a sharded parameter have their own stream.

    Attributes:
        masters: the float32 weights by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], seed: int, rank: int) -> None:
        self._parameters, self._seed, self._rank = parameters, seed, rank
        self.masters: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        self.round(0)

    @torch.no_grad()
    def round(self, step: int) -> None:
        """Give the parameters the rounding of the masters that belongs to optimizer step `step`."""
        for name, p in self._parameters.items():
            own, names = local(p.detach()), ("rounding", step, name, *((self._rank,) if is_sharded(p) else ()))
            generator = torch.Generator(own.device).manual_seed(derive_seed(self._seed, *names))
            stochastic(local(self.masters[name]), generator, out=own)

    @contextmanager
    def updated(self, step: int) -> Generator[None]:
        """The parameters are the masters inside this block, and their rounding of step `step` after it."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(self.masters[name])
        yield
        with torch.no_grad():
            for name, p in self._parameters.items():
                self.masters[name].copy_(p)
        self.round(step)

    def load(self, masters: Mapping[str, Tensor], step: int) -> None:
        """Take masters from a checkpoint of optimizer step `step`."""
        for name, master in self.masters.items():
            master.copy_(like(masters[name], master))
        self.round(step)
