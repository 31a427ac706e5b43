"""Commands that no run needs: scores, credit, formula checks, grams, data files."""
