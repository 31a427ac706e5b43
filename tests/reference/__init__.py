"""Literal float64 transcriptions of the formulas, one Python loop each. Nothing here imports the package."""
