"""Composition of components into advantages and a loss: column graph, pipeline, objective, plain plug-ins."""
