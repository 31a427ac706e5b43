"""Processes, files, locks, HTTP, and other services of the operating system."""
