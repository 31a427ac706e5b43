"""Keeps a library that takes the process for its own from changing it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager


class Isolation:
    """Runs the code of a library under its own environment variables, and puts everything back afterwards.

    Put back are the environment, the generators of Python, NumPy and torch, the number of threads and the
    function that sets it, and the default dtype. Variables that the library sets are its own: the next block
    finds them again, and nobody else does.

    Args:
        variables: environment variables that the library is to find.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Everything inside the block belongs to the library."""
        environment = dict(os.environ)
        os.environ.update(self._variables)
        try:
            with _process_state():
                yield
        finally:
            self._variables = {k: v for k, v in os.environ.items() if environment.get(k) != v}
            for name in self._variables.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


@contextmanager
def _process_state() -> Generator[None]:
    """Generators, threads and default dtype, as they were."""
    import random

    import numpy as np
    import torch

    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    set_threads, threads, dtype = torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus)
        torch.set_num_threads = set_threads  # vLLM replaces it by a function without effect
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            set_threads(threads)
