"""How good a completion is: rewards, and the pool of processes that runs them."""
