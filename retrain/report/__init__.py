"""HTML reports, charts and model cards."""
