"""Comparison of advantages and token transforms on stored completions."""
