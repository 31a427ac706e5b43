"""Sections that are not defined in `retrain.config.schema`, and the base class of all sections."""
