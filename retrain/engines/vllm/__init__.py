"""vLLM as an engine: in the trainer's process, or as servers."""
