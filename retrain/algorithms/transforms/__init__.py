"""Token transforms: spread an episode advantage over the tokens of its completion."""
