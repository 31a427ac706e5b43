"""Run directories on disk: their files, checkpoints and records, and the check whether they can be trusted."""
