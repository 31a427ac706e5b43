"""Detection of planning tokens: strategic grams, detectors and the planning mask."""
