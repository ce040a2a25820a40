"""Initial states and data of planned steps, which all backends share."""

import numpy as np

from costmodels.sharding.graph import STATE, TensorKind
from tests.support.programs.sharded_steps import GPT, unsharded
from trials.training.numerics import INITIAL_STD, initial_state, whole_batch


def test_states_begin_as_models_do():
    """Moments and biases are zero, scales of norms one, and matrices random by their name and the seed alone."""
    graph = unsharded(GPT).graph
    found = {op.name: initial_state(graph, op, 3) for op in graph.ops if op.primitive == STATE}
    kinds = {tensor.name: tensor.kind for tensor in graph.tensors}

    assert all(not value.any() for name, value in found.items() if kinds[name] is TensorKind.OPTIMIZER)
    assert not found["head.norm.bias"].any()
    assert not found["layers.0.dense_mlp.up_bias.bias"].any()
    assert (found["head.norm.weight"] == 1).all()
    assert abs(found["embedding.weight"].std() / INITIAL_STD - 1) < 0.02
    (op,) = (op for op in graph.ops if op.name == "embedding.weight")
    assert (initial_state(graph, op, 3) == found["embedding.weight"]).all()
    assert (initial_state(graph, op, 4) != found["embedding.weight"]).any()


def test_labels_are_the_tokens_that_follow():
    """A label is the token after it, tokens are in the vocabulary, and low ones are the most frequent."""
    found = whole_batch(unsharded(GPT).graph, 0)

    assert (found["tokens"][:, 1:] == found["labels"][:, :-1]).all()
    assert 0 <= found["tokens"].min() <= found["tokens"].max() < GPT.vocab_size
    assert np.median(found["tokens"]) < GPT.vocab_size / 4
