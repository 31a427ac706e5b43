"""The credit audit: quality of a method's credit and gradient under a fixed policy, without training."""
