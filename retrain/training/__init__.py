"""Training of the policy and of other models of a run."""
