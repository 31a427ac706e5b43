"""Trackers, which send metrics to services such as Weights & Biases."""
