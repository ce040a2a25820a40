"""Build the graph of a decoder-only transformer from its sizes. Begin with `model_graph.py`."""
