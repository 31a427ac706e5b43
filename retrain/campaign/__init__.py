"""Campaigns: conditions x seeds, executed as isolated runs, compared with statistics. Importing registers executors."""

from retrain.campaign import executors as executors
