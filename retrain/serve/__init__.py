"""Servers: a policy that programs talk to, and vLLM for a run."""
