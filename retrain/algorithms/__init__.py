"""Advantages, token transforms, signals, filters and loss terms."""
