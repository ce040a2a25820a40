"""Views in rules: operators see through them, and mean the same."""

import math
from dataclasses import replace

import pytest
import torch

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.frontends.rule_parts import Call
from costmodels.sharding.frontends.torch.calls import bound, name_of
from costmodels.sharding.frontends.torch.rules import rule_of_call
from costmodels.sharding.frontends.torch.view_folding import compose_rule
from tests.support.graphs.torch_graphs import graph_of_torch
from tests.support.graphs.torch_variants import Varied

aten = torch.ops.aten


def rule_for(op, *arguments):
    """The rule of a call on these arguments, and what it returns."""
    params, operands = bound(op, arguments, {}, lambda one: isinstance(one, torch.Tensor))
    result = op(*arguments)
    call = Call(
        primitive=name_of(op),
        operands=tuple(tuple(one.shape) for one in operands),
        results=(tuple(result.shape),),
        params=params,
    )
    return rule_of_call(call, op), result


def laid(array, before, after, sizes):
    """An array of a place as that of another, whose dims hold the same factors in another order, or some repeated."""
    held = [factor for dim in before for factor in dim]
    wanted = [factor for dim in after for factor in dim]
    array = array.reshape([sizes[factor] for factor in held])
    array = array.permute([held.index(factor) for factor in wanted if factor in held])
    array = array.reshape([sizes[factor] if factor in held else 1 for factor in wanted])
    array = array.expand([sizes[factor] for factor in wanted])
    return array.reshape([math.prod(sizes[factor] for factor in dim) for dim in after])


CASES = {
    "rows of batch and sequence": (aten.mm.default, aten.view.default, (4, 6, 8), ((24, 8),), (8, 10)),
    "weights turned": (aten.mm.default, aten.t.default, (8, 4), (), (8, 6)),
    "batch and heads": (aten.bmm.default, aten.view.default, (2, 4, 6, 8), ((8, 6, 8),), (8, 8, 4)),
    "keys for several queries": (aten.bmm.default, aten.expand.default, (1, 6, 8), ((4, 6, 8),), (4, 8, 4)),
    "a sum of merged dims": (aten.sum.dim_IntList, aten.view.default, (4, 6, 8), ((24, 8),), [0]),
    "heads of hidden": (aten._softmax.default, aten.view.default, (4, 24), ((4, 6, 4),), 1, False),
    "dims in another order": (aten.exp.default, aten.permute.default, (4, 6, 8), ((2, 0, 1),)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_seen_through_a_view_means_the_same(name):
    """On halves of the tensor behind the view, along each factor that can be cut, results are those of one run."""
    op, view, shape, how, *others = CASES[name]
    torch.manual_seed(0)
    others = [torch.rand(other) if isinstance(other, tuple) else other for other in others]
    behind = torch.rand(shape)
    view_rule, seen = rule_for(view, behind, *how)
    rule, whole = rule_for(op, seen, *others)

    found = compose_rule(rule, rule.operands[0], view_rule, view_rule.results[0], view_rule.operands[0])

    refined, far = found.refined, found.far
    through = replace(refined, operands=(far, *refined.operands[1:]))
    sizes = [factor.size for factor in refined.factors]
    assert torch.equal(laid(behind, far, refined.operands[0], sizes), seen)
    halves = [number for number in through.cuttable if sizes[number] % 2 == 0]
    assert halves
    for number in halves:
        local = [size // 2 if one == number else size for one, size in enumerate(sizes)]
        dims = [dims[number] for dims in through.operand_dims]
        parts = []
        for half in (0, 1):
            taken = behind if dims[0] is None else behind.chunk(2, dim=dims[0])[half]
            # a tensor beside the view is a part of what its factors are, not of what follows each other in it
            rest = iter(refined.operands[1:])
            beside = [
                part(other, next(rest), number, half, sizes, local) if isinstance(other, torch.Tensor) else other
                for other in others
            ]
            parts.append(op(laid(taken, far, refined.operands[0], local), *beside))
        if refined.factors[number].kind == FactorKind.REDUCTION:
            made = parts[0] + parts[1]
        else:
            made = joined(parts, refined.results[0], number, local)
        assert torch.allclose(made, whole, rtol=1e-5), number


def part(array, place, number, half, sizes, local):
    """Half of an array along a factor, wherever this stands among those of its dim."""
    held = [factor for dim in place for factor in dim]
    if number not in held:
        return array
    apart = array.reshape([sizes[factor] for factor in held]).chunk(2, dim=held.index(number))[half]
    return apart.reshape([math.prod(local[factor] for factor in dim) for dim in place])


def joined(parts, place, number, local):
    """Two halves along a factor as one."""
    held = [factor for dim in place for factor in dim]
    apart = [one.reshape([local[factor] for factor in held]) for one in parts]
    whole = torch.cat(apart, dim=held.index(number))
    sizes = [2 * size if one == number else size for one, size in enumerate(local)]
    return whole.reshape([math.prod(sizes[factor] for factor in dim) for dim in place])


def test_dims_that_have_nothing_in_common_stay_apart():
    """A reshape of (4, 6) to (8, 3) mixes elements, so that nobody sees through it."""
    view_rule, seen = rule_for(aten.view.default, torch.rand(4, 9), (6, 6))
    rule, _ = rule_for(aten.exp.default, seen)

    found = compose_rule(rule, rule.operands[0], view_rule, view_rule.results[0], view_rule.operands[0])

    assert found is None


def ops_of(function, shape):
    """The forward operators of a graph by what they compute."""
    graph = graph_of_torch(Varied(function, shape), ())
    return graph, {op.primitive: op for op in graph.ops[: graph.first_backward] if not op.is_source}


def test_linear_layers_see_batch_and_sequence():
    """The rows of a linear layer's product are two factors, and no view is left."""
    graph, ops = ops_of(lambda x: (torch.nn.functional.linear(x, x[0]),), (4, 6, 8))

    product = ops["mm"]
    assert [len(graph.tensors[product.operands[0]].shape), len(graph.tensors[product.results[0]].shape)] == [3, 3]
    assert [product.rule.factors[factor].size for factor in product.rule.cuttable] == [4, 6, 6, 8]
    assert not ops.keys() & {"view", "_unsafe_view", "t"}


def test_batched_products_see_batch_and_heads():
    """An axis can cut the heads of a product whose batch torch flattens."""
    graph, ops = ops_of(lambda x: (x @ x.transpose(2, 3),), (2, 4, 6, 8))

    product = ops["bmm"]
    assert graph.tensors[product.results[0]].shape == (2, 4, 6, 6)
    assert [product.rule.factors[factor].size for factor in product.rule.cuttable][:2] == [2, 4]


def test_a_view_that_mixes_elements_stays():
    """A view that nobody can see through is an operator that needs whole the dims that it mixes."""
    _, ops = ops_of(lambda x: (x.exp().view(6, 6).exp(),), (4, 9))

    rule = ops["view"].rule
    assert [rule.factors[factor].size for factor in rule.cuttable] == [2]
