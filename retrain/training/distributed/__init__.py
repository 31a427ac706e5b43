"""Ranks of a run, and the weights that they share."""
