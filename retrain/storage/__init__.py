"""Run directories on disk: files, checkpoints, records, and whether to trust them."""
