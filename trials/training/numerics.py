"""Numbers of a training step that sharding plans describe: constants, initial states and data.

Backends that execute the graph of `costmodels/sharding/frontends/transformer` share them, so that their losses are the
same for the same seed. States and data depend on the seed and on names alone, whatever the plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from costmodels.sharding.dims import Place
from costmodels.sharding.frontends.transformer.training_step import MASTER
from costmodels.sharding.graph import INPUT, STATE, Graph, Op, TensorKind
from costmodels.sharding.micro_batches import count_micro_batches

LOSS = "head.cross_entropy"
"""Name of the tensor that holds the mean loss over all tokens [1]."""

EPSILON = 1e-5
"""Number added to the variance in norms (GPT-2, Llama)."""

ROTARY_BASE = 10_000.0
"""Base of the rotary angles (RoFormer, Su et al. 2021, section 3.2.2)."""

# Constants of the optimizers, also of the torch backend's own trainer.
LEARNING_RATE = 1e-3
FIRST_DECAY = 0.9
SECOND_DECAY = 0.95
ADAM_EPSILON = 1e-8
WEIGHT_DECAY = 0.1

INITIAL_STD = 0.02
"""Standard deviation of matrices (GPT-2, Megatron-LM --init-method-std)."""

SKEW = 3.0
"""Exponent of the token distribution: tokens are u^SKEW of the vocabulary with u uniform, some much more frequent."""


def initial_state(graph: Graph, op: Op, seed: int) -> NDArray[np.float32]:
    """Return a state as a whole: zeros for moments and biases, ones for weights of norms, else random numbers.

    A master copy equals its parameter.

    Args:
        graph: Graph of the step.
        op: Operator of a parameter or moment, of the kind STATE.
        seed: Seed of all weights.
    """
    name = op.name.removesuffix(f".{MASTER}")
    if name != op.name:
        return initial_state(graph, next(one for one in graph.ops if one.name == name), seed)
    (tensor,) = op.results
    shape, kind = graph.tensors[tensor].shape, graph.tensors[tensor].kind
    first = graph.uses[tensor][0]
    reader = graph.ops[first.op].primitive
    if kind is TensorKind.OPTIMIZER or reader == "bias" or (reader == "layer_norm" and first.operand == 2):
        return np.zeros(shape, np.float32)
    if reader.endswith("_norm"):
        return np.ones(shape, np.float32)
    return small_normal(op.name, shape, seed)


def einsum_equation(operands: Sequence[Place], result: Place) -> str:
    """Return the equation of a product that sums over all factors that the result lacks; each dim is a letter."""
    letters: dict[tuple[int, ...], str] = {}
    words = [
        "".join(letters.setdefault(dim, chr(ord("a") + len(letters))) for dim in place) for place in (*operands, result)
    ]
    return f"{','.join(words[:-1])}->{words[-1]}"


def whole_batch(graph: Graph, seed: int) -> dict[str, NDArray[np.int32]]:
    """Return sequences of random tokens with skewed frequencies, and as labels each token's next one.

    They are those of all micro-batches of the step, so that their number changes no data.

    Args:
        graph: Graph of the step, whose inputs are `tokens` and `labels` [batch, sequence] of a micro-batch.
        seed: Seed of the data.
    """
    shapes = {op.name: graph.tensors[op.results[0]].shape for op in graph.ops if op.primitive in (INPUT, STATE)}
    (rows, length), (vocabulary, _) = shapes["tokens"], shapes["embedding.weight"]
    uniform = _rng(seed, "tokens").random((rows * count_micro_batches(graph), length + 1))
    tokens = np.minimum((uniform**SKEW * vocabulary).astype(np.int32), vocabulary - 1)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def small_normal(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return the initial values of a matrix."""
    return INITIAL_STD * _rng(seed, name).standard_normal(shape, dtype=np.float32)


def uniform(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return numbers between 0 and 1 for an input of a user's step that has none."""
    return _rng(seed, name).random(shape, dtype=np.float32)


def _rng(seed: int, name: str) -> Generator:
    return default_rng([seed, zlib.crc32(name.encode())])
