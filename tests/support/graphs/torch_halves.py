"""Runs an ATen operator on the halves of its operands along a factor, and puts the halves of its results together.

What partitioners do with masks is done here too: a part of a table answers what it holds and zeros else, a part of what
is written to takes what falls into it, and what is added to a partial sum is added once.
"""

import sys
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Interpreter

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.rule_parts import Call, blocked_rule
from costmodels.sharding.frontends.torch.calls import Operand, bound, name_of
from costmodels.sharding.frontends.torch.program import trace_module
from costmodels.sharding.frontends.torch.rules import rule_of_call

COMBINED = {
    "amax": torch.maximum,
    "amin": torch.minimum,
    "any": torch.logical_or,
    "all": torch.logical_and,
    "prod": torch.mul,
    "mean": lambda one, other: (one + other) / 2,
}
"""What puts partial results together, where it is no addition; parts of a mean divide by the number of the whole."""

ADDED_ONCE = {"addmm": 0, "baddbmm": 0, "convolution": 2, "scatter_add": 0, "index_put": 0}
"""The operand that only one part of a sum adds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """A call of an operator with values."""

    op: OpOverload
    params: dict
    operands: tuple
    results: tuple

    @property
    def call(self):
        """Return the call in the form that rules take."""
        return Call(
            primitive=name_of(self.op),
            operands=tuple(tuple(one.shape) for one in self.operands),
            results=tuple(tuple(one.shape) for one in self.results),
            params=self.params,
        )

    @property
    def rule(self):
        """That of the call."""
        return rule_of_call(self.call, self.op)


def cases_of(module, inputs, loss=None):
    """The calls in the training step of a module of float32; floats are random, indices those that stand there."""
    program = trace_module(module, inputs, loss)
    found = []

    class Recorder(Interpreter):
        def call_function(self, target, args, kwargs):
            made = super().call_function(target, args, kwargs)
            if isinstance(target, OpOverload):
                params, operands = bound(target, args, kwargs, lambda one: isinstance(one, torch.Tensor))
                results = tensors_of(made)
                if operands and results and 0 not in results[0].shape:
                    values = tuple(_random(one) if one.is_floating_point() else one.clone() for one in operands)
                    results = _run(target, params, [one.clone() for one in values])
                    found.append(Case(op=target, params=params, operands=values, results=results))
            return made

    values = [node.meta["val"] for node in program.trace.graph.find_nodes(op="placeholder")]
    torch.manual_seed(0)
    with torch.no_grad():
        Recorder(program.trace).run(*(_random(value) for value in values))
    return found


def kind_of(case):
    """Equal for calls whose rules differ in nothing but sizes; elementwise ones need only broadcast equally much."""
    call = case.call
    if torch.Tag.pointwise in case.op.tags:
        return call.primitive, tuple(len(shape) > 0 for shape in call.operands), len(set(call.operands))
    rule = case.rule or blocked_rule(call)
    plain = {key: value for key, value in call.params.items() if isinstance(value, (bool, str))}
    return call.primitive, str([factor.kind for factor in rule.factors]), rule.operands, rule.results, str(plain)


def tensors_of(made):
    """The results of a call that are tensors."""
    several = made if isinstance(made, (tuple, list)) else [made]
    return tuple(one for one in several if isinstance(one, torch.Tensor))


def halved(case, rule, factor):
    """The results of a case, put together from runs on two halves along a factor."""
    parts = [_half(case, rule, factor, half) for half in (0, 1)]
    found = []
    for slot, pair in enumerate(zip(*parts, strict=True)):
        dim = rule.result_dims[slot][factor]
        if dim is not None:
            found.append(torch.cat(pair, dim=dim))
        elif rule.factors[factor].kind == FactorKind.MAP and len(rule.results) == 1:
            found.append(pair[1])
        else:
            found.append(COMBINED.get(case.call.primitive, torch.add)(*pair))
    return found


def are_close(one, other):
    """Return whether two lists of results are equal but for the order of additions."""
    return all(
        left.shape == right.shape
        and (
            torch.allclose(left, right, rtol=1e-4, atol=1e-5 * float(right[right.isfinite()].abs().amax()))
            if right.is_floating_point() or right.is_complex()
            else bool(torch.equal(left, right))
        )
        for left, right in zip(one, other, strict=True)
    )


def _random(value):
    if value.dtype == torch.bool:
        return torch.rand(value.shape) > 0.5
    if not value.is_floating_point():
        return torch.randint(0, 4, value.shape, dtype=value.dtype)
    return torch.rand(value.shape, dtype=value.dtype) * 0.9 + 0.1


def _half(case, rule, factor, half):
    operands = [
        one if dims[factor] is None else one.chunk(2, dim=dims[factor])[half].contiguous()
        for one, dims in zip(case.operands, rule.operand_dims, strict=True)
    ]
    name = case.call.primitive
    is_partial = rule.factors[factor].kind == FactorKind.REDUCTION
    once = ADDED_ONCE.get(name)
    if is_partial and half and once is not None and once < len(operands) and rule.operand_dims[once][factor] is None:
        operands[once] = torch.zeros_like(operands[once])
    params = _local(case, rule, factor)
    if name == "_grouped_mm":
        operands = _half_of_groups(case, rule, factor, half, operands)
    if name in LOOK_UPS and is_partial and rule.operand_dims[0][factor] is not None:
        return _looked_up(case, rule, factor, half, operands, params)
    if name in WRITES and not is_partial and rule.result_dims[0][factor] is not None:
        found = _written(case, rule, factor, half, operands, params)
        if found is not None:
            return found
    if params.get("is_causal"):
        _causal_by_mask(rule, factor, half, params, operands)
    return _run(case.op, params, operands)


def _half_of_groups(case, rule, factor, half, operands):
    """Give a half of a product of groups the ends of the groups in its rows, or the rows of its groups."""
    left, right, *offsets = operands
    if not offsets:
        return operands
    (ends,) = offsets
    dims = [each[factor] for each in rule.operand_dims[:2]]
    ranks = [one.dim() for one in case.operands[:2]]
    if 3 in ranks and dims[ranks.index(3)] == 0:
        matrices = operands[ranks.index(3)]
        missing = torch.zeros_like(matrices)
        operands[ranks.index(3)] = torch.cat((missing, matrices) if half else (matrices, missing))
        return operands
    if ranks == [2, 2] and dims == [None, None]:
        count = len(ends) // 2
        first, last = (int(ends[count - 1]), int(ends[-1])) if half else (0, int(ends[count - 1]))
        return [left[:, first:last], right[first:last], (ends[count:] if half else ends[:count]) - first]
    # rows of the left matrix, columns of the right one, or contracted elements
    ragged, dim = {(2, 3): (0, 0), (3, 2): (1, 1), (2, 2): (0, 1)}[tuple(ranks)]
    if dims[ragged] == dim:
        length = operands[ragged].shape[dim]
        return [left, right, (ends - half * length).clamp(0, length)]
    return operands


def _run(op, params, operands):
    def of(value):
        if isinstance(value, Operand):
            return operands[value.slot]
        return [of(one) for one in value] if isinstance(value, list) else value

    given = {key: of(value) for key, value in params.items()}
    keys = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    rest = {key: value for key, value in given.items() if key not in keys}
    return tensors_of(op(*(given[key] for key in keys), **rest))


LOOK_UPS = ("embedding", "gather", "index")
WRITES = ("embedding_dense_backward", "scatter", "scatter_add", "scatter_reduce", "index_put")


def _indexing(case, dim):
    """The operand that says where along a dim."""
    name = case.call.primitive
    return case.params["indices"][dim].slot if name.startswith("index") else 1


def _looked_up(case, rule, factor, half, operands, params):
    """Look indices up in a part of a table, which answers zeros for rows that it doesn't hold."""
    dim = rule.operand_dims[0][factor]
    size = operands[0].shape[dim]
    slot = _indexing(case, dim)
    local = operands[slot] - half * size
    operands[0] = torch.cat([operands[0], torch.zeros_like(operands[0].narrow(dim, 0, 1))], dim=dim)
    operands[slot] = torch.where((local < 0) | (local >= size), size, local)
    return _run(case.op, params, operands)


def _written(case, rule, factor, half, operands, params):
    """Write the updates that fall into a part of the operand; all others go to a row that is dropped."""
    dim = rule.result_dims[0][factor]
    name = case.call.primitive
    is_backward = name == "embedding_dense_backward"
    if is_backward and dim != 0:
        return None
    if name.startswith("index") and (dim >= len(case.params["indices"]) or case.params["indices"][dim] is None):
        return None
    if name.startswith("scatter") and dim != case.params["dim"] % case.results[0].dim():
        return None
    slot = 1 if is_backward else _indexing(case, dim)
    size = case.results[0].shape[dim] // 2
    local = operands[slot] - half * size
    operands[slot] = torch.where((local < 0) | (local >= size), size, local)
    if is_backward:
        params["num_weights"] = size + 1
        padded = params["padding_idx"] - half * size
        params["padding_idx"] = padded if 0 <= padded < size else -1
    else:
        operands[0] = torch.cat([operands[0], operands[0].narrow(dim, 0, 1)], dim=dim)
    return tuple(one.narrow(dim, 0, size) for one in _run(case.op, params, operands))


def _causal_by_mask(rule, factor, half, params, operands):
    """A part of the queries has its part of the mask."""
    params["is_causal"] = False
    slot = params["query"].slot
    rows, columns = (operands[params[key].slot].shape[2] for key in ("query", "key"))
    is_cut = rule.operand_dims[slot][factor] == 2
    first = half * rows if is_cut else 0
    seen = torch.arange(columns) <= torch.arange(first, first + rows)[:, None]
    params["attn_mask"] = torch.where(seen, 0.0, -torch.inf)


def _local(case, rule, factor):
    """The parameters, where they say shapes, of a half."""
    name, params = case.call.primitive, dict(case.params)
    result = [
        size // 2 if dim == rule.result_dims[0][factor] else size for dim, size in enumerate(case.results[0].shape)
    ]
    if name in ("view", "_unsafe_view", "expand"):
        params["size"] = result
    elif name == "slice" and rule.operand_dims[0][factor] == params["dim"]:
        params["end"] = sys.maxsize
    elif name.startswith("native_group_norm"):
        if rule.operand_dims[0][factor] == 0:
            params["N"] //= 2
        else:
            params["C"] //= 2
            params["group"] //= 2
    elif name.startswith("convolution"):
        image, weight = (0, 1) if name == "convolution" else (1, 2)
        dims = rule.operand_dims[image][factor], rule.operand_dims[weight][factor]
        out_dim = rule.result_dims[0][factor] if name == "convolution" else rule.operand_dims[0][factor]
        if dims == (1, 0) and out_dim == 1:
            params["groups"] //= 2
    elif name.startswith("upsample") and name.endswith("backward"):
        params["input_size"] = result
    return params
