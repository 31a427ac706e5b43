"""Rewards, and the pool of processes that runs them."""
