"""Careful processes, files and locks: one mechanism each."""
