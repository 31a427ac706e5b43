"""Episode advantages: one number per completion."""
