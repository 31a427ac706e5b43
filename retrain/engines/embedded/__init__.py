"""The embedded engine's parts; importing any of them imports torch and transformers."""
