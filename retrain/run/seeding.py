"""The generators that code without a seed of its own draws from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    Called at the start of every step, so that plug-ins which draw from them are reproducible, and a resumed
    run draws what it would have drawn without any generator's state in the checkpoint.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
