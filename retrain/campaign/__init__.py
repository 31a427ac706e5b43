"""Campaigns: conditions x seeds, executed as isolated runs, compared with statistics. Importing registers executors."""

from retrain.campaign.work import executors as executors
from retrain.campaign.work import ray_executor as ray_executor
