"""Runs of primitives on the halves of their operands along a factor, whose results are joined.

The masks of partitioners are applied here too: half a table answers zeros for the rows of the other half, half of an
operand takes only the updates that fall into it, and partial sums count their initial operand once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.jax.flat import INLINED, called_by
from costmodels.sharding.frontends.jax.rules import ELEMENTWISE, rule_of_call
from costmodels.sharding.frontends.rule_parts import Call, blocked_rule
from tests.support.quick_xla import QUICK

COMBINED = {
    "reduce_max": np.maximum,
    "reduce_min": np.minimum,
    "reduce_or": np.logical_or,
    "reduce_and": np.logical_and,
}
"""Functions that combine partial results, where addition does not."""

PER_PROGRAM = 100
"""Runs that are compiled together: a program takes long to compile, however little it does."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """A function and the arrays to call it with, not called yet."""

    function: Callable
    operands: tuple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """Call of a primitive with random values."""

    equation: object
    operands: tuple

    @property
    def call(self):
        """Return the call in the form that rules take."""
        return call_of(self.equation)


def cases_of(function, arguments, rng):
    """Return a program's calls on random operands, one for each kind of rule that a primitive has there.

    Tensors of bfloat16 become float32, so that sums can be compared.
    """
    closed = jax.make_jaxpr(function)(*jax.tree.map(_widened, arguments))
    calls = [(call_of(equation), equation) for equation in equations_of(closed.jaxpr)]
    return {
        key: Case(equation=equation, operands=_operands(equation, rng))
        for key, equation in {kind_of(call): equation for call, equation in calls}.items()
    }


def call_of(equation):
    """Convert an equation to the form that rules take."""
    return Call(
        primitive=equation.primitive.name,
        operands=tuple(atom.aval.shape for atom in equation.invars),
        results=tuple(var.aval.shape for var in equation.outvars),
        params=equation.params,
    )


def kind_of(call):
    """Return a key that is equal for calls whose rules differ in sizes alone.

    Elementwise calls are of one kind if equally many of their operands broadcast.
    """
    if call.primitive in ELEMENTWISE:
        return call.primitive, tuple(len(shape) > 0 for shape in call.operands), len(set(call.operands))
    rule = rule_of_call(call) or blocked_rule(call)
    strides = [call.params.get(key) for key in ("window_strides", "lhs_dilation", "rhs_dilation")]
    return call.primitive, str([factor.kind for factor in rule.factors]), rule.operands, rule.results, str(strides)


def equations_of(jaxpr):
    """Yield all equations, including those inside calls and loops."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        called = called_by(equation, equation.invars)[0] if name in INLINED else None
        inner = params["jaxpr"] if name == "scan" else called
        if inner is None:
            yield equation
        else:
            yield from equations_of(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _operands(equation, rng):
    """Draw random operands; indices stay inside the operand that they index."""
    found = [_random(atom.aval, rng) for atom in equation.invars]
    if equation.primitive.name == "gather" or equation.primitive.name.startswith("scatter"):
        numbers = equation.params["dimension_numbers"]
        dims = getattr(numbers, "start_index_map", None) or numbers.scatter_dims_to_operand_dims
        sizes = [found[0].shape[dim] for dim in dims]
        found[1] = rng.integers(0, sizes, found[1].shape).astype(found[1].dtype)
    if equation.primitive.name in ("cholesky", "triangular_solve"):
        found[0] = found[0] + found[0].swapaxes(-1, -2) + 2 * found[0].shape[-1] * np.eye(found[0].shape[-1], dtype="f")
    if equation.primitive.name == "ragged_dot_general":
        (ragged,) = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        ends = np.sort(rng.integers(0, found[0].shape[ragged], found[2].shape))
        found[2] = np.diff(ends, prepend=0).astype(found[2].dtype)
    return tuple(found)


def whole(case):
    """Return the run of a case on its whole operands."""
    return Run(function=_binding(case.equation, case.equation.params), operands=case.operands)


def halves(case, rule, factor):
    """Return the two runs of a case on the halves of its operands along a factor."""
    return [_half(case, rule, factor, half) for half in (0, 1)]


def joined(case, rule, factor, parts):
    """Return the results of a case, put together from those of both halves."""
    found = []
    for slot, pair in enumerate(zip(*parts, strict=True)):
        dim = rule.result_dims[slot][factor]
        if dim is not None:
            found.append(np.concatenate(pair, axis=dim))
        elif rule.factors[factor].kind == FactorKind.REDUCTION:
            found.append(COMBINED.get(case.equation.primitive.name, np.add)(*pair))
        else:
            found.append(pair[1])
    return found


def computed(runs):
    """Return the results of each run; many runs are compiled as one program."""
    found = []
    for first in range(0, len(runs), PER_PROGRAM):
        batch = runs[first : first + PER_PROGRAM]

        def program(operands, batch=batch):
            return [run.function(*own) for run, own in zip(batch, operands, strict=True)]

        results = jax.jit(program, compiler_options=QUICK)([run.operands for run in batch])
        found += [list(map(np.asarray, own)) for own in results]
    return found


def are_close(one, other):
    """Return whether two lists of results are equal but for the order of additions."""
    return all(
        left.shape == right.shape
        and (
            np.allclose(
                left,
                right,
                rtol=1e-4,
                atol=1e-5 * max(1.0, float(np.max(np.abs(right[np.isfinite(right)]), initial=0.0))),
            )
            if np.issubdtype(right.dtype, np.inexact)
            else bool(np.array_equal(left, right))
        )
        for left, right in zip(one, other, strict=True)
    )


def _widened(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)


def _random(leaf, rng):
    if leaf.dtype == bool:
        return rng.integers(0, 2, leaf.shape).astype(bool)
    if np.issubdtype(leaf.dtype, np.integer):
        return rng.integers(0, 6, leaf.shape).astype(leaf.dtype)
    return rng.uniform(0.1, 1.0, leaf.shape).astype(leaf.dtype)


def _binding(equation, params):
    def call(*operands):
        results = equation.primitive.bind(*operands, **params)
        return results if equation.primitive.multiple_results else [results]

    return call


def _half(case, rule, factor, half):
    name = case.equation.primitive.name
    operands = [
        value if dim is None else _part(value, dim, half)
        for value, dim in zip(case.operands, (dims[factor] for dims in rule.operand_dims), strict=True)
    ]
    params = _local(case, rule, factor, operands)
    is_partial = rule.factors[factor].kind == FactorKind.REDUCTION
    if name == "gather" and is_partial:
        dim = rule.operand_dims[0][factor]
        operands[1] = _shifted(
            operands[1], params["dimension_numbers"].start_index_map.index(dim), operands[0], dim, half
        )
        params |= {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    if name == "ragged_dot_general":
        operands = _half_of_groups(case, rule, factor, half, operands)
    if name.startswith("scatter"):
        dim = rule.operand_dims[0][factor]
        numbers = params["dimension_numbers"]
        if dim in numbers.inserted_window_dims:
            slot = numbers.scatter_dims_to_operand_dims.index(dim)
            operands[1] = _shifted(operands[1], slot, operands[0], dim, half)
            params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
        if is_partial and half:
            operands[0] = np.zeros_like(operands[0])
    if name == "dynamic_update_slice" and rule.operand_dims[1][factor] is None:
        return Run(function=partial(_update_part, rule.operand_dims[0][factor], half), operands=tuple(operands))
    return Run(function=_binding(case.equation, params), operands=tuple(operands))


def _half_of_groups(case, rule, factor, half, operands):
    """Give a half of a product of groups the groups of its rows, or the rows of its groups."""
    numbers = case.call.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    rows, matrices, sizes = operands
    ends = np.cumsum(sizes)
    if rule.operand_dims[0][factor] == ragged:
        length = rows.shape[ragged]
        first, last = (np.clip(side - half * length, 0, length) for side in (ends - sizes, ends))
        return [rows, matrices, last - first]
    dim = rule.operand_dims[1][factor]
    if dim in numbers.rhs_group_dimensions:
        missing = np.zeros_like(matrices)
        return [rows, np.concatenate((missing, matrices) if half else (matrices, missing), axis=dim), sizes]
    if (rule.operand_dims[0][factor], dim) == (None, None):
        skipped = -int(sizes[: len(sizes) // 2].sum()) * half
        other = numbers.dot_dimension_numbers[0][1][numbers.dot_dimension_numbers[0][0].index(ragged)]
        return [np.roll(rows, skipped, axis=ragged), np.roll(matrices, skipped, axis=other), _part(sizes, 0, half)]
    return operands


def _part(value, dim, half):
    return np.split(value, 2, axis=dim)[half]


def _shifted(indices, slot, operand, dim, half):
    """Convert indices to those of a part of the operand; indices of the other part become too large."""
    moved = indices.copy()
    moved[..., slot] -= half * operand.shape[dim]
    return np.where((moved < 0).any(axis=-1, keepdims=True), np.iinfo(indices.dtype).max, moved)


def _update_part(dim, half, part, update, *starts):
    """Run a dynamic_update_slice on a part, with margins that take the elements that fall beside it."""
    starts, length, size = list(starts), update.shape[dim], part.shape[dim]
    start = jnp.clip(starts[dim], 0, 2 * size - length) - half * size
    starts[dim] = jnp.clip(start, -length, size) + length
    margins = [(length, length) if number == dim else (0, 0) for number in range(part.ndim)]
    wide = lax.dynamic_update_slice(jnp.pad(part, margins), update, starts)
    return [lax.slice_in_dim(wide, length, length + size, axis=dim)]


def _local(case, rule, factor, operands):
    """Return the parameters of a half: those that state shapes differ from the whole's."""
    name, params = case.equation.primitive.name, dict(case.equation.params)
    result = tuple(
        size // 2 if dim == rule.result_dims[0][factor] else size for dim, size in enumerate(case.call.results[0])
    )
    if name == "broadcast_in_dim":
        params["shape"] = result
    elif name == "reshape":
        params["new_sizes"] = result
    elif name == "slice":
        cut = rule.operand_dims[0][factor]
        limits = params["limit_indices"]
        params["limit_indices"] = tuple(size // 2 if dim == cut else size for dim, size in enumerate(limits))
    elif name == "tile":
        is_repeated = rule.operand_dims[0][factor] is None
        cut = rule.result_dims[0][factor] if is_repeated else None
        params["reps"] = tuple(count // 2 if dim == cut else count for dim, count in enumerate(params["reps"]))
    elif name == "dynamic_slice":
        params["slice_sizes"] = result
    elif name == "gather":
        params["slice_sizes"] = tuple(map(min, params["slice_sizes"], operands[0].shape))
    elif name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        is_group = rule.operand_dims[1][factor] == numbers.rhs_spec[0]
        if is_group and rule.operand_dims[0][factor] == numbers.lhs_spec[1]:
            params["feature_group_count"] //= 2
        if is_group and rule.operand_dims[0][factor] == numbers.lhs_spec[0]:
            params["batch_group_count"] //= 2
    return params
