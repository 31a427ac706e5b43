"""Extraction of strategic grams by clusters of embeddings."""
