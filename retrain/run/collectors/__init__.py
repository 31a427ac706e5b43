"""Collectors of rollouts that a run imports only if it uses them."""
