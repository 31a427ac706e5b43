"""Campaigns: conditions x seeds, executed as isolated runs, compared with statistics. Importing registers executors."""

from retrain.campaign import executors as executors
from retrain.campaign import ray_executor as ray_executor
