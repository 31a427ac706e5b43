"""Rewards, and the pool of worker processes that computes them."""
