"""Tasks, which provide problems, and row sources, which add rows to training steps."""
