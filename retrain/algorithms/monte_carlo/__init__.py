"""Credit from values that are measured: completions are continued from their middle, and the rewards averaged."""
