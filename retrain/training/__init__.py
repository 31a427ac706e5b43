"""The policy and what it is trained with."""
