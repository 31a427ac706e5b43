"""Small working examples of plug-ins; each imports only `from retrain import ...`, or nothing at all."""
