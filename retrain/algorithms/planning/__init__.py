"""Which tokens are planning: grams, detectors and the planning mask."""
