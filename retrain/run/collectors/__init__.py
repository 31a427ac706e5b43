"""Collectors of the rollouts of a step. The continuous one is imported only if a run uses it."""
