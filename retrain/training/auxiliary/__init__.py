"""Second models of a run: teacher and critic. Importing them does not import torch."""
