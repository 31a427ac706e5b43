"""Subprocess, file and lock utilities: one mechanism each."""
