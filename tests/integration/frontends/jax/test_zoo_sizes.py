"""The full-size programs of the zoo have the parameters that are published, or those that their sizes make."""

import math

import jax
import pytest

from benchmarks.zoo import FACTORIES
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import trace_function

MILLION = 1_000_000

PUBLISHED = {
    # Gemma team 2024, table 2: parameters of the embedding and all others
    "gemma_2b": 524_550_144 + 1_981_884_416,
    "gemma_2b_32k": 524_550_144 + 1_981_884_416,
    "gemma_7b": 786_825_216 + 7_751_248_896,
    # huggingface.co/mistralai/Mixtral-8x7B-v0.1, the tensors' elements together
    "mixtral": 46_702_792_704,
}

OF_TOAST = {
    # name: parameters that section 5.1 names, and the share of them that its sizes make here
    "graph_network": (875 * MILLION, 0.53),
    "unet_3b": (3600 * MILLION, 0.99),
    "itx": (5000 * MILLION, 0.26),
}


def parameters(name):
    """Count the parameters of a program without tracing it."""
    _, arguments, _ = FACTORIES[name]()
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(arguments[0]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name):
    """Not one more and not one less."""
    assert parameters(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", OF_TOAST)
def test_models_of_toast_are_as_large_as_documented(name):
    """The share of the paper's parameters that the sizes it lists make, to a hundredth."""
    of_paper, share = OF_TOAST[name]

    assert parameters(name) / of_paper == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("name", ["gemma_7b", "graph_network_8k", "unet_3b", "itx"])
def test_full_sizes_are_traced_without_allocating(name):
    """All arguments are shapes, every primitive has a rule, and the graph's parameters are the program's."""
    function, arguments, donated = FACTORIES[name]()
    graph = graph_of(trace_function(function, *arguments, donated=donated))

    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))
    assert graph.unknown == ()
    params = [graph.tensors[op.results[0]] for op in graph.ops if op.is_source and op.name.startswith("params.")]
    assert sum(math.prod(tensor.shape) for tensor in params) == parameters(name)
