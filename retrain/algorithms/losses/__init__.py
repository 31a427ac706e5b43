"""Loss terms, which give one number per token. The objective applies their reduction and weight."""
