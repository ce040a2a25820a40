"""Ways between orders of axes: they arrive, every move on them is cheap, and what they permute is what is broken."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import example, given, settings

from benchmarks.support.sent_bytes import reorders
from costmodels.sharding.exports.axis_order import axis_orders
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.exports.reorders import way
from tests.support.graphs.random_graphs import plans
from tests.support.graphs.shared_factors import contested_plan

A, B, C = range(3)
SIZES = (4, 2, 3)


@pytest.mark.parametrize(
    ("before", "after", "layouts", "permuted_bytes"),
    [
        pytest.param(((A, B),), ((A,),), [((A,),)], 0, id="a gather of what comes last"),
        pytest.param(((A, B),), ((B,),), [((B, A),), ((B,),)], 3, id="a gather of what comes first"),
        pytest.param(((B,),), ((A, B),), [((B, A),), ((A, B),)], 3, id="a slice to what comes first"),
        pytest.param(((A, B), ()), ((), (A, B)), [((), (A, B))], 0, id="an exchange in one order"),
        pytest.param(((A, B), ()), ((), (B, A)), [((), (A, B)), ((), (B, A))], 3, id="an exchange in two orders"),
        pytest.param(((B, A), ()), ((), (A,)), [((B,), (A,)), ((), (A,))], 0, id="an exchange, and then a gather"),
        pytest.param(((A, B), ()), ((), (A,)), [((B, A), ()), ((B,), (A,)), ((), (A,))], 3, id="an exchange, reversed"),
        pytest.param(((A, B, C),), ((C, B),), [((C, B, A),), ((C, B),)], 1, id="two that stay in another order"),
    ],
)
def test_ways(before, after, layouts, permuted_bytes):
    """Parts are permuted on the side that has fewer bytes, exchanges come before gathers, and no layout comes twice."""
    found = way(before, after, 24.0, SIZES)

    assert list(found.layouts) == layouts
    assert found.permuted_bytes == permuted_bytes


@given(plan=plans())
@example(plan=contested_plan())
@settings(max_examples=120)
def test_ways_arrive_by_cheap_moves(plan):
    """Every step permutes the axes of dims and nothing else, or finds those that stay in front in one order.

    Places where an order is broken cost a permutation, and no others do.
    """
    orders = axis_orders(plan)
    for change in (each for each in relayouts(plan) if each.at == "use"):
        before, after = orders.lying(change.tensor), orders.read(change.op, change.slot)
        found = way(before, after, plan.graph.tensors[change.tensor].num_bytes, plan.mesh.sizes)
        assert (found.layouts or (before,))[-1] == after
        for one, other in itertools.pairwise((before, *found.layouts)):
            if [set(order) for order in one] == [set(order) for order in other]:
                continue
            for old, new in zip(one, other, strict=True):
                stays = [axis for axis in old if axis in new]
                assert [*old[: len(stays)]] == [*new[: len(stays)]] == stays
    costs = defaultdict(float)
    for each in reorders(orders):
        costs[each.tensor] += each.permuted_bytes * each.times
    assert set(costs) == {tensor for tensor, _ in orders.broken}
    assert all(num_bytes > 0 for num_bytes in costs.values())
