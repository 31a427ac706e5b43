"""What is on disk: the run directory, the checkpoint store, records, and how they are trusted."""
