"""The model that is trained: loading, forward, packing, adapters."""
