"""The documented path of `retrain.adapters.dca_reference`."""

from retrain.adapters.dca_reference import *  # noqa: F403
from retrain.adapters.dca_reference import __all__ as __all__
