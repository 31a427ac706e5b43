"""Who answers the model: environments, the processes that hold their live episodes, and those that are built in."""
