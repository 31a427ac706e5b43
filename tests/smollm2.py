"""The real model that tests train where it was fetched; found before tests have a cache of their own."""

import pytest

from retrain.system.model_paths import SMOLLM2

HERE = SMOLLM2.is_here
FOLDER = SMOLLM2.directory
MISSING = "SmolLM2 is not in the cache: fetch it with `retrain model fetch smollm2`"
needs_smollm2 = pytest.mark.skipif(not HERE, reason=MISSING)
