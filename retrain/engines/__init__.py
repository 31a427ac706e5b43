"""Inference engines: the embedded engine, transformers' `generate`, and vLLM."""
