"""Tasks: sources of problems."""
