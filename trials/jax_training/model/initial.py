"""Initial states and data of a step, which depend on the seed and on names alone, whatever the plan."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from costmodels.sharding.graph import INPUT, STATE, Graph, Op, TensorKind

INITIAL_STD = 0.02
"""Standard deviation of matrices (GPT-2, Megatron-LM --init-method-std)."""

SKEW = 3.0
"""Exponent of the token distribution: tokens are u^SKEW of the vocabulary with u uniform, some much more frequent."""


def initial_states(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return all parameters and moments, each on the devices of its sharding.

    Args:
        graph: Graph of the step.
        seed: Seed of all weights.
        shardings: Sharding of each state by its name.
    """
    return {
        op.name: _put(_state(graph, op, _rng(seed, op.name)), shardings[op.name])
        for op in graph.ops
        if op.primitive == STATE
    }


def batch(graph: Graph, seed: int, shardings: Mapping[str, NamedSharding]) -> dict[str, Array]:
    """Return sequences of random tokens with skewed frequencies, and as labels each token's next one.

    Args:
        graph: Graph of the step, whose inputs are `tokens` and `labels` [batch, sequence].
        seed: Seed of the data.
        shardings: Sharding of each input by its name.
    """
    shapes = {op.name: graph.tensors[op.results[0]].shape for op in graph.ops if op.primitive in (INPUT, STATE)}
    (rows, length), (vocabulary, _) = shapes["tokens"], shapes["embedding.weight"]
    uniform = _rng(seed, "tokens").random((rows, length + 1))
    tokens = np.minimum((uniform**SKEW * vocabulary).astype(np.int32), vocabulary - 1)
    found = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    return {name: _put(array, shardings[name]) for name, array in found.items()}


def _state(graph: Graph, op: Op, rng: Generator) -> NDArray[np.float32]:
    """Return a state as a whole: zeros for moments and biases, ones for weights of norms, else random numbers."""
    (tensor,) = op.results
    shape, kind = graph.tensors[tensor].shape, graph.tensors[tensor].kind
    first = graph.uses[tensor][0]
    reader = graph.ops[first.op].primitive
    if kind is TensorKind.OPTIMIZER or reader == "bias" or (reader == "layer_norm" and first.operand == 2):
        return np.zeros(shape, np.float32)
    if reader.endswith("_norm"):
        return np.ones(shape, np.float32)
    return INITIAL_STD * rng.standard_normal(shape, dtype=np.float32)


def _put(whole: NDArray[np.generic], sharding: NamedSharding) -> Array:
    """Return an array whose parts are on the devices of a sharding; a process fills only its own devices."""
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _rng(seed: int, name: str) -> Generator:
    return default_rng([seed, zlib.crc32(name.encode())])
