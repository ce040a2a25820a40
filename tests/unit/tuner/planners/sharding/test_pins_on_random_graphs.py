"""Pins on random graphs and meshes: they hold in every order of visits, with and without a descent."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.sharding.plan import cost_of, violations
from hardware.io.errors import ConfigError
from tests.support.graphs.random_graphs import choices, graphs, meshes
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.manumatic import PinnedSearch
from tuner.planners.sharding.pins import Pin, deviation, resolve_pins
from tuner.planners.sharding.recursive import ORDERS, recursive_plan, refine_mesh, whole
from tuner.planners.sharding.sharding_terms import ShardingTerms

MUCH_S = 1e6
"""More than any step of these graphs takes."""


@st.composite
def pins_of(draw, graph, mesh, most=3):
    """Up to so many hard pins, each of an operator's factor that can be cut; they may not be able to hold."""
    able = [op for op in graph.ops if not op.is_source and op.rule.cuttable]
    found = []
    for _ in range(draw(st.integers(1, most)) if able else 0):
        op = draw(st.sampled_from(able))
        factor = draw(st.sampled_from(op.rule.cuttable))
        axis = draw(st.sampled_from((None, *mesh.names)))
        along = mesh.num_devices if axis is None else mesh.sizes[mesh.names.index(axis)]
        ways = [None] * (axis is not None) + ([count for count in range(2, along + 1) if along % count == 0] or [1])
        found.append(Pin(op=op.name, dim=f"f{factor}", axis=axis, ways=draw(st.sampled_from(ways))))
    return found


def that_hold(pins, graph, mesh, levels):
    """Those that can hold together, the first ones first."""
    found = []
    for pin in pins:
        try:
            resolve_pins([*found, pin], graph, mesh, levels)
        except ConfigError:
            continue
        found.append(pin)
    return found


def parts(pin, row, mesh, own_mesh):
    """Into how many parts a row cuts the factor that a pin names, and into how many it must."""
    factor = int(pin.dim.removeprefix("f"))
    names = [name.partition(".")[0] for name in own_mesh.names]
    cut = math.prod(
        size
        for size, name, served in zip(own_mesh.sizes, names, row, strict=True)
        if served == factor and pin.axis in (None, name)
    )
    return cut, pin.ways or mesh.sizes[mesh.names.index(pin.axis)]


def holds(pin, plan, mesh):
    """Whether what a pin names is cut into a multiple of its ways."""
    number = next(at for at, op in enumerate(plan.graph.ops) if op.name == pin.op)
    cut, ways = parts(pin, plan.served[number].tolist(), mesh, plan.mesh)
    return cut % ways == 0


@pytest.mark.slow
@given(data=st.data(), graph=graphs(), mesh=meshes(), is_whole=st.booleans())
@settings(max_examples=150)
def test_hard_pins_hold_everywhere(data, graph, mesh, is_whole):
    """Pins that can hold together hold in every order and in a descent, in plans that can run and cost what is said."""
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    pins = that_hold(data.draw(pins_of(graph, mesh)), graph, mesh, levels)
    terms = ShardingTerms(graph, own_mesh)
    for order, descent in [*((order, None) for order in ORDERS), (data.draw(st.sampled_from(ORDERS)), terms)]:
        search = PinnedSearch(
            graph=graph, mesh=mesh, refined_mesh=own_mesh, levels=levels, order=order, descent=descent
        )
        found = search.plan(pins, counterfactuals=False)

        assert all(holds(pin, found.plan, mesh) for pin in pins)
        assert all(report.is_held and report.missing == 0 for report in found.reports)
        assert violations(found.plan) == ()
        cost = cost_of(found.plan)
        assert (found.cost.step_time_s, found.cost.peak_memory_bytes) == (cost.step_time_s, cost.peak_memory_bytes)


@given(graph=graphs(), mesh=meshes(), is_whole=st.booleans())
@settings(max_examples=30)
def test_no_pins_are_d_rec_to_the_bit(graph, mesh, is_whole):
    """Without pins the planner `recursive` makes D-Rec's choice for every operator, in every order."""
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    for order in ORDERS:
        found = plan_graph(graph, mesh, PlannerOptions(planner="recursive", order=order, whole_axes=is_whole))

        assert (found.plan.served == recursive_plan(graph, own_mesh, levels, order=order).served).all()


@given(data=st.data(), graph=graphs(max_ops=4), mesh=meshes(), is_whole=st.booleans())
def test_pins_of_an_operator_that_are_refused_can_not_hold(data, graph, mesh, is_whole):
    """What is refused of one operator's hard pins is served by none of its rows, and what is not refused by some."""
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    pins = data.draw(pins_of(graph, mesh))
    assume(pins)
    pins = [pin for pin in pins if pin.op == pins[0].op]
    op = next(op for op in graph.ops if op.name == pins[0].op)
    can_hold = any(
        all(cut % ways == 0 for cut, ways in (parts(pin, row, mesh, own_mesh) for pin in pins))
        for row in choices(op, own_mesh.sizes)
    )

    assert bool(that_hold(pins, graph, mesh, levels) == pins) == can_hold


@given(data=st.data(), graph=graphs(), mesh=meshes(), is_whole=st.booleans(), descends=st.booleans())
def test_a_soft_pin_of_great_weight_holds_where_a_hard_one_can(data, graph, mesh, is_whole, descends):
    """With weights that grow beyond any step, soft pins end in a plan that satisfies all that can hold together."""
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    pins = that_hold(data.draw(pins_of(graph, mesh)), graph, mesh, levels)
    terms = ShardingTerms(graph, own_mesh) if descends else None
    search = PinnedSearch(graph=graph, mesh=mesh, refined_mesh=own_mesh, levels=levels, descent=terms)
    missing = []
    for weight_s in (0.0, 1e-5, 1e-2, MUCH_S):
        soft = [replace(pin, weight_s=weight_s) for pin in pins]
        found = search.plan(soft, counterfactuals=False)
        missing.append(sum(report.missing for report in found.reports))
        told = [report.is_held for report in found.reports]
        assert told == [holds(pin, found.plan, mesh) for pin in pins]

    assert missing[-1] == 0


@given(split=st.integers(1, 10**6), target=st.integers(1, 10**6))
def test_deviation_is_what_is_missing(split, target):
    """D is zero for multiples of the target alone, and the logarithm of what is missing else."""
    assert deviation(split, target) == pytest.approx(math.log(target // math.gcd(split, target)))
    assert (deviation(split, target) == 0) == (split % target == 0)
