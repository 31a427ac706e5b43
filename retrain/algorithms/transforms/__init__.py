"""Token transforms, which distribute an episode's advantage over the tokens of its completion."""
