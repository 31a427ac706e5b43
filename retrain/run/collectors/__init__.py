"""Collection of the rollouts of consecutive steps: in order, or continuously."""
