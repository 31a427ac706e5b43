"""Execution of campaigns: directory, workers, leases, executors."""
