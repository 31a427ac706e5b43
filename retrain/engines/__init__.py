"""Where completions come from: the embedded engine, transformers' generate, and vLLM."""
