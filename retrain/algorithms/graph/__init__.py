"""How components become credit and loss: the column graph, the pipeline, the objective, plain plug-ins."""
