"""Sinks of metrics besides the run directory."""
