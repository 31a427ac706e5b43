"""Isolation of process-wide state from a library that changes it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager


class Isolation:
    """Context manager that runs a library with its own environment variables and restores state.

    It restores the environment, the random generators of Python, NumPy and torch, the number of
    threads and the function that sets it, and the default dtype. Variables that the library sets
    are visible inside later blocks only.

    Args:
        variables: environment variables for the library.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Run the library's code inside the block."""
        environment = dict(os.environ)
        os.environ.update(self._variables)
        try:
            with _process_state():
                yield
        finally:
            # What the library has set belongs to its next block.
            self._variables = {k: v for k, v in os.environ.items() if environment.get(k) != v}
            for name in self._variables.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)


@contextmanager
def _process_state() -> Generator[None]:
    """Restore random generators, threads and default dtype after the block."""
    import random

    import numpy as np
    import torch

    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Asking an uninitialised CUDA for its state would initialise it.
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    set_threads, threads, dtype = torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus)
        torch.set_num_threads = set_threads  # vLLM replaces it with a function that does nothing
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            set_threads(threads)
