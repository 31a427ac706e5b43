"""How good a completion is: rewards, and the pool of processes that runs them. Importing registers the rewards."""

from retrain.rewards import boxed_math as boxed_math
from retrain.rewards import text as text
