"""Who runs the runs of a campaign: directory, workers, leases, executors."""
