"""Progress of runs and campaigns, on a live screen or in lines."""
