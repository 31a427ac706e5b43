"""`python -m retrain`: the same as the command `retrain`."""

from retrain.cli.main import main

if __name__ == "__main__":  # a dotted path may name this module
    main()
