"""Operators of the transformer frontend in JAX, by primitive: what each computes on whole tensors.

`costmodels/sharding/frontends/transformer` describes a training step as a graph of operators, gradients and update
included. OPERATORS says how JAX computes each of them, so that a graph can be executed operator by operator, in the
layouts of any plan of that graph. No operator knows of devices. `operators` adds those that depend on the model.

A function takes the operator and its operands, and returns its results. In bfloat16 a product takes its operands as
they are, and so does what moves tokens. All other operators get them in float32, and the step rounds their results. A
partial sum is made in the type of its result, so that this type is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from costmodels.sharding.dims import Place
from costmodels.sharding.graph import Op
from trials.jax_training.model.attention import attend, attend_gradient
from trials.jax_training.model.experts import combine, combine_gradient, dispatch, dispatch_gradient, routing
from trials.training.numerics import EPSILON, ROTARY_BASE, einsum_equation

Compute = Callable[..., tuple[Array, ...]]
"""Function of an operator and its operands that returns its results."""


def _einsum(operands: Sequence[tuple[Array, Place]], result: Place, *, is_wide: bool = False) -> Array:
    """Multiply operands and sum over all factors that the result lacks.

    A wide product is float32 whatever its operands.
    """
    equation = einsum_equation([place for _, place in operands], result)
    dtype = jnp.float32 if is_wide else None
    arrays = [array for array, _ in operands]
    return jnp.einsum(equation, *arrays, preferred_element_type=dtype)


def _products(op: Op, x: Array, *weights: Array, is_wide: bool = False) -> tuple[Array, ...]:
    """Multiply a tensor by each weight."""
    rule = op.rule
    return tuple(
        _einsum([(x, rule.operands[0]), (weight, place)], result, is_wide=is_wide)
        for weight, place, result in zip(weights, rule.operands[1:], rule.results, strict=True)
    )


def _product_data_gradient(op: Op, *operands: Array) -> tuple[Array, ...]:
    """Return the sum of the gradients of all products: the first half of the operands, each times its weight.

    One product computes all of them, so that a partial sum is added up once: the factors that only some products have
    lie behind each other in it.
    """
    rule, half = op.rule, len(operands) // 2
    if half == 1:
        return (_einsum(list(zip(operands, rule.operands, strict=True)), rule.results[0]),)
    places = [[factor for dim in place for factor in dim] for place in rule.operands]
    common = set(places[0]).intersection(*places[1:half])
    common_of_weights = set(places[half]).intersection(*places[half + 1 :])
    gradients = _joined(op, operands[:half], places[:half], common)
    weights = _joined(op, operands[half:], places[half:], common_of_weights)
    return (_einsum([gradients, weights], rule.results[0]),)


def _joined(op: Op, arrays: Sequence[Array], places: Sequence[list[int]], common: set[int]) -> tuple[Array, Place]:
    """Join arrays along all factors that are not in common; return the array with one factor for each other dim.

    The joined dim comes last, and stands for a factor that no place of the rule has.
    """
    order = [factor for factor in places[0] if factor in common]
    sizes = [op.rule.factors[factor].size for factor in order]
    parts = []
    for array, place in zip(arrays, places, strict=True):
        whole = array.reshape([op.rule.factors[factor].size for factor in place])
        own = [factor for factor in place if factor not in common]
        turned = whole.transpose([place.index(factor) for factor in (*order, *own)])
        parts.append(turned.reshape(*sizes, -1))
    return jnp.concatenate(parts, axis=-1), (*((factor,) for factor in order), (len(op.rule.factors),))


def _bias(op: Op, x: Array, bias: Array) -> tuple[Array, ...]:
    """Add a bias along the dims of x that it has, which lie in the same order."""
    of_x, of_bias = op.rule.operands
    shape = [size if place in of_bias else 1 for place, size in zip(of_x, x.shape, strict=True)]
    return (x + bias.reshape(shape),)


def _sum_out(op: Op, given: Array) -> tuple[Array, ...]:
    """Sum over the dims that the result lacks."""
    return (_einsum([(given, op.rule.operands[0])], op.rule.results[0]),)


def _rms(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + EPSILON) * weight


def _layer(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return _rms(centred, weight) + bias


def _layer_gradient(op: Op, x: Array, weight: Array, given: Array) -> tuple[Array, ...]:
    # the gradients do not depend on the bias, which the operator does not read
    return _gradients_of(_layer)(op, x, weight, jnp.zeros_like(weight), given)


def _rotary(x: Array) -> Array:
    """Rotate x [b, s, heads, d] by its position, where the first half of d is paired with the second half."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * rates
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _rotary_gradient(op: Op, given: Array) -> tuple[Array, ...]:
    # a rotation is linear, so that its gradient does not depend on what was rotated
    return _gradients_of(_rotary)(op, jnp.zeros_like(given), given)


def _gated(x: Array) -> Array:
    """Multiply the SiLU of the first of two inputs [..., 2, f] by the second."""
    return jax.nn.silu(x[..., 0, :]) * x[..., 1, :]


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _sigmoid_scale(x: Array, gate: Array) -> Array:
    return x * jax.nn.sigmoid(gate)[..., None]


def _positions(x: Array, table: Array) -> Array:
    return x + table[: x.shape[1]]


def _positions_gradient(op: Op, given: Array) -> tuple[Array, ...]:
    rows = op.rule.result_shape(0)[0]
    return (jnp.pad(given.sum(axis=0), ((0, rows - given.shape[1]), (0, 0))),)


def _one_hot(tokens: Array, like: Array) -> Array:
    return (tokens[..., None] == jnp.arange(like.shape[-1])).astype(like.dtype)


def _lookup(tokens: Array, table: Array) -> Array:
    return jnp.take(table, tokens, axis=0)


def _lookup_gradient(op: Op, tokens: Array, given: Array) -> tuple[Array, ...]:
    return (jnp.zeros(op.rule.result_shape(0), given.dtype).at[tokens].add(given),)


def _exponential_sum(logits: Array, largest: Array) -> Array:
    return jnp.exp(logits - largest[..., None]).sum(axis=-1)


def _label_logit(logits: Array, labels: Array) -> Array:
    # every device adds the labels that it has, where a lookup would gather the logits
    return (logits * _one_hot(labels, logits)).sum(axis=-1)


def _mean_loss(op: Op, largest: Array, total: Array, chosen: Array) -> tuple[Array, ...]:
    return ((largest + jnp.log(total) - chosen).mean().reshape(op.rule.result_shape(0)),)


def _cross_entropy_gradient(logits: Array, largest: Array, total: Array, labels: Array) -> Array:
    softmax = jnp.exp(logits - largest[..., None]) / total[..., None]
    return (softmax - _one_hot(labels, logits)) / labels.size


def _plain(function: Callable[..., Array | tuple[Array, ...]]) -> Compute:
    """Return a function of arrays as one of an operator and its operands."""

    def compute(_: Op, *operands: Array) -> tuple[Array, ...]:
        found = function(*operands)
        return found if isinstance(found, tuple) else (found,)

    return compute


def _gradients_of(function: Callable[..., Array]) -> Compute:
    """Return the gradients of a function: its operands are those of the function, and the gradient of its result."""

    def gradients(_: Op, *operands: Array) -> tuple[Array, ...]:
        _, pull_back = jax.vjp(function, *operands[:-1])  # type: ignore[arg-type] # mypy takes the operands' types from ours
        found: tuple[Array, ...] = pull_back(operands[-1])
        return found

    return gradients


OPERATORS: Mapping[str, Compute] = {
    "embedding": _plain(_lookup),
    "embedding_gradient": _lookup_gradient,
    "positions": _plain(_positions),
    "positions_gradient": _positions_gradient,
    "matmul": _products,
    "matmul_data_gradient": _product_data_gradient,
    "matmul_weight_gradient": partial(_products, is_wide=True),
    "batch_matmul": _products,
    "batch_matmul_data_gradient": _product_data_gradient,
    "batch_matmul_weight_gradient": partial(_products, is_wide=True),
    "bias": _bias,
    "bias_gradient": _sum_out,
    "rms_norm": _plain(_rms),
    "rms_norm_gradient": _gradients_of(_rms),
    "layer_norm": _plain(_layer),
    "layer_norm_gradient": _layer_gradient,
    "rotary": _plain(_rotary),
    "rotary_gradient": _rotary_gradient,
    "attention": _plain(partial(attend, causal=True)),
    "attention_gradient": _plain(partial(attend_gradient, causal=True)),
    "full_attention": _plain(partial(attend, causal=False)),
    "full_attention_gradient": _plain(partial(attend_gradient, causal=False)),
    "activation": _plain(_gelu),
    "activation_gradient": _gradients_of(_gelu),
    "gated_activation": _plain(_gated),
    "gated_activation_gradient": _gradients_of(_gated),
    "dispatch": dispatch,
    "dispatch_gradient": dispatch_gradient,
    "combine": combine,
    "combine_gradient": combine_gradient,
    "sigmoid_scale": _plain(_sigmoid_scale),
    "sigmoid_scale_gradient": _gradients_of(_sigmoid_scale),
    "add": _plain(lambda *parts: sum(parts[1:], start=parts[0])),
    "maximum": _plain(lambda logits: logits.max(axis=-1)),
    "exponential_sum": _plain(_exponential_sum),
    "label_logit": _plain(_label_logit),
    "mean_loss": _mean_loss,
    "cross_entropy_gradient": _plain(_cross_entropy_gradient),
}
"""What each primitive of a forward or backward pass computes, without those that depend on the model's numbers."""


NARROW = (
    *(f"{kind}matmul{gradient}" for kind in ("", "batch_") for gradient in ("", "_data_gradient", "_weight_gradient")),
    *(
        f"{name}{gradient}"
        for name in ("attention", "full_attention", "dispatch", "combine")
        for gradient in ("", "_gradient")
    ),
    "embedding",
)
"""Primitives that take operands in the type in which these lie; all others get them in float32."""


def operators(*, top_k: int) -> Mapping[str, Compute]:
    """Return what each primitive of a model computes.

    Args:
        top_k: Number of experts that a token chooses; dense models route nothing.
    """
    route = partial(routing, top_k=top_k)
    found = {**OPERATORS, "routing": _plain(route), "routing_gradient": _gradients_of(route)}
    return {name: function if name in NARROW else _in_float32(function) for name, function in found.items()}


def _in_float32(function: Compute) -> Compute:
    """Return a function that gets operands of narrower floats in float32."""

    def compute(op: Op, *operands: Array) -> tuple[Array, ...]:
        return function(op, *(each.astype(jnp.float32) if each.dtype == jnp.bfloat16 else each for each in operands))

    return compute
