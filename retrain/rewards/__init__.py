"""How good a completion is: rewards, and the pool of processes that runs them. Importing registers the rewards."""

from retrain.rewards import text as text
