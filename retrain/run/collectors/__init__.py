"""Collectors of rollouts other than that of the loop, imported when a run uses them."""
