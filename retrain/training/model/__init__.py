"""The model in training: loading, forward passes, packing and adapters."""
