"""Campaigns: conditions x seeds, executed as isolated runs, compared with statistics."""
