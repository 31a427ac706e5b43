"""Multi-turn environments: their contract, the worker processes that run them, and built-in ones."""
