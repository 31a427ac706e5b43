"""One training run: built from a configuration, looped over, evaluated and exported."""
