"""Campaigns: conditions x seeds; empty until campaigns are built."""
