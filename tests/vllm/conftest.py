"""One vLLM engine at a time: each is started for the tests of one module and model, and closed after them."""

import os
import random

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="make test-vllm installs it")


def disturbance() -> dict:
    """Everything of this process that vLLM changes if it is let."""
    return {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "environment": dict(os.environ),
    }
