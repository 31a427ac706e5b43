"""`python -m retrain`: the same as the command `retrain`."""

from retrain.cli.main import main

main()
