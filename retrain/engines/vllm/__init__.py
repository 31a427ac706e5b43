"""vLLM engines: in the trainer's process, or as servers."""
