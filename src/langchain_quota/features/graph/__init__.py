"""Limits without a node of the graph: around the model call, and in any graph."""
