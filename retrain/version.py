"""The version, which modules of the package read here: nothing inside imports `retrain` itself."""

__version__ = "0.4.0"
