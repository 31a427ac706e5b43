"""Servers: a trained policy as an OpenAI-compatible endpoint, and vLLM for a run."""
