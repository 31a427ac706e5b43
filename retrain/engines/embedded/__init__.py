"""Parts of the embedded engine. Each of them imports torch and transformers."""
