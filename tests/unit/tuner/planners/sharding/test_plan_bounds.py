"""Bounds of a step: no plan is faster, HiGHS's optima are close above, and what is eliminated loses nothing."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from costmodels.sharding.dims import Factor, FactorKind, Rule
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import NONE, Plan, cost_of
from tests.support.graphs.attention_graphs import attention
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes, plan_of, plans
from tests.support.graphs.small_graphs import mlp
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.sharding import plan_bounds
from tuner.planners.sharding.plan_bounds import step_time_bound
from tuner.planners.sharding.sharding_milp import choices_of, shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms

NOTHING_S = 1e-9
"""HiGHS loses a nanosecond beside collectives of microseconds."""


def disputed_partial_sum() -> Plan:
    """Return a plan in which one reader wants a partial sum cut along an axis and another reader wants it whole.

    Both axes leave partial sums of 48 bytes. On one device per host an all-reduce along both axes costs 36 us of
    latency. An all-reduce along `data` and a reduce-scatter along `model` cost 40 us.
    """
    graph = GraphBuilder(name="disputed")
    source = graph.source(INPUT, "source", (12,), 2, TensorKind.DATA)
    summed = graph.tensor("summed", (24,), 2, TensorKind.ACTIVATION)
    factors = (Factor(size=12, kind=FactorKind.REDUCTION), Factor(size=24, kind=FactorKind.MAP))
    graph.op("sum", "any", [source], [summed], Rule(factors=factors, operands=(((0,),),), results=(((1,),),)))
    for name, kind in (("of a cut", FactorKind.REDUCTION), ("of the whole", FactorKind.BLOCKED)):
        result = graph.tensor(name, (), 2, TensorKind.ACTIVATION)
        rule = Rule(factors=(Factor(size=24, kind=kind),), operands=(((0,),),), results=((),))
        graph.op(name, "any", [summed], [result], rule)
    rows = [(NONE, NONE), (0, 0), (NONE, 0), (NONE, NONE)]
    return plan_of(graph.done(), mesh_of(2, 3, devices_per_host=1), rows)


@given(plan=plans())
@example(plan=disputed_partial_sum())
def test_pairwise_terms_are_no_more_than_a_plan_costs(plan):
    """With the plan's row alone for each operator the terms add up to its step time at most."""
    terms = ShardingTerms(plan.graph, plan.mesh).pairwise([(tuple(row),) for row in plan.served.tolist()])

    assert all(term.scope == () for term in terms)
    assert sum(float(term.table) for term in terms) <= cost_of(plan).step_time_s * (1 + 1e-9)


@given(graph=graphs(max_ops=5), mesh=meshes(max_axes=2))
@settings(max_examples=40)
def test_no_optimum_is_below_the_bound(graph, mesh):
    """What HiGHS proves to be the best plan of a random graph takes no less than the bound."""
    outcome = shard_by_milp(graph, mesh, limits=Limits(time_s=5.0))
    assume(outcome.known is Known.OPTIMAL)

    assert step_time_bound(ShardingTerms(graph, mesh)) <= outcome.best.cost * (1 + 1e-7) + NOTHING_S


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("graph", [mlp(), attention()], ids=["mlp", "attention"])
def test_the_bound_is_close_to_the_optimum(graph, sizes):
    """On a perceptron and on attention it is below what HiGHS finds, by a tenth at most."""
    mesh = mesh_of(*sizes)
    optimum = shard_by_milp(graph, mesh).best.cost

    assert 0.9 * optimum <= step_time_bound(ShardingTerms(graph, mesh)) <= optimum * (1 + 1e-7)


def test_too_large_tables_leave_the_operators_alone(monkeypatch):
    """Where the tables would be too large the bound is what all operators take at least, each by itself."""
    terms = ShardingTerms(attention(), mesh_of(2, 2))
    tight = step_time_bound(terms)
    monkeypatch.setattr(plan_bounds, "MOST_ENTRIES", 10)
    rows = [choices_of(op, (2, 2)) for op in terms.graph.ops]
    alone = sum(float(np.min(term.table)) for term in terms.alone(rows))

    assert step_time_bound(terms) == pytest.approx(alone, rel=1e-9)
    assert alone < tight


@given(data=st.data(), counts=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_eliminating_loses_nothing(data, counts):
    """The least sum of a network's tables is the same after variables were taken out, by trying all assignments."""
    network, terms = plan_bounds.Network(counts), []
    numbers = st.integers(0, 9)
    for _ in range(data.draw(st.integers(0, 7))):
        scope = tuple(sorted(data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=2))))
        shape = tuple(counts[variable] for variable in scope)
        size = math.prod(shape)
        table = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=float).reshape(shape)
        terms.append((scope, table))
        network.add(scope, table)
    best = min(
        sum(table[tuple(values[variable] for variable in scope)] for scope, table in terms)
        for values in itertools.product(*map(range, counts))
    )
    network.eliminate()
    left = sorted(network.open)
    found = network.constant + min(
        sum(network.own[one][values[at]] for at, one in enumerate(left))
        + sum(
            table[values[at], values[left.index(other)]]
            for at, one in enumerate(left)
            for other, table in network.beside[one].items()
            if one < other
        )
        for values in itertools.product(*(range(counts[one]) for one in left))
    )

    assert found == pytest.approx(best)
    assert all(len(network.beside[one]) > 2 for one in left)
