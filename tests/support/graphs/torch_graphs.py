"""Graphs of torch modules, from a module at once."""

from costmodels.sharding.frontends.torch.graph import graph_of
from costmodels.sharding.frontends.torch.program import trace_module


def graph_of_torch(module, inputs, loss=None):
    """Return the graph of a module's training step."""
    return graph_of(trace_module(module, inputs, loss))
