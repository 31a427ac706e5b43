"""Sections of a configuration that stand apart, and what all sections are made of."""
