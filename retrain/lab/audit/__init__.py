"""The credit audit: what the credit of a method is worth under a policy, before anyone trains with it."""
