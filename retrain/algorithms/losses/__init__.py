"""Loss terms: one number per token. The reduction and the weight are applied outside."""
