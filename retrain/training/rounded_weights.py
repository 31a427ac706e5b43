"""Stochastic rounding of trained weights to bfloat16, with float32 master weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from retrain.functional.rounding import stochastic
from retrain.functional.seeds import derive_seed
from retrain.training.distributed.sharded_tensors import is_sharded, like, local


class RoundedWeights:
    """Rounds every trained parameter stochastically to bfloat16, once per step.

    The trainer computes with the rounded weights, and the sampler receives them. The optimizer updates float32
    masters: an update smaller than the spacing of bfloat16 numbers changes the rounded weight with a probability in
    proportion to its size, while rounding to nearest would lose it. The random numbers of a step derive from the seed,
    the step and the parameter's name. So ranks that hold the same weights round them alike, and a resumed run rounds
    like an uninterrupted one.

    Args:
        parameters: float32 parameters by name; they are rounded at once, for step 0.
        seed: seed of the rounding.
        rank: index of this rank; its rows of a sharded parameter have random numbers of their own.

    Attributes:
        masters: the float32 master weights by name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], seed: int, rank: int) -> None:
        self._parameters, self._seed, self._rank = parameters, seed, rank
        self.masters: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        self.round(0)

    @torch.no_grad()
    def round(self, step: int) -> None:
        """Set the parameters to the masters, rounded with the random numbers of optimizer step `step`."""
        for name, p in self._parameters.items():
            values = local(p.detach())
            names = ("rounding", step, name, *((self._rank,) if is_sharded(p) else ()))
            generator = torch.Generator(values.device).manual_seed(derive_seed(self._seed, *names))
            stochastic(local(self.masters[name]), generator, out=values)

    @contextmanager
    def updated(self, step: int) -> Generator[None]:
        """Give the parameters the masters' values for the optimizer inside this block, then round for step `step`."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                # The optimizer knows the parameters only, so they hold the masters during its step.
                p.copy_(self.masters[name])
        yield
        with torch.no_grad():
            for name, p in self._parameters.items():
                self.masters[name].copy_(p)
        self.round(step)

    def load(self, masters: Mapping[str, Tensor], step: int) -> None:
        """Load masters from a checkpoint of optimizer step `step`, and round them for this step."""
        for name, master in self.masters.items():
            master.copy_(like(masters[name], master))
        self.round(step)
