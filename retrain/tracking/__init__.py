"""Sinks of metrics besides the run directory. Importing this declares them and loads no tracking library."""

from retrain.tracking.tracker_guard import Guard
from retrain.tracking.trackers import Tensorboard, Trackio, Wandb

__all__ = ["Guard", "Tensorboard", "Trackio", "Wandb"]
