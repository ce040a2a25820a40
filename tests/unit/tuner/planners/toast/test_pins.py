"""TOAST under pins and limits of memory, on random graphs: hard pins hold in every state and plan, soft ones charge."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.sharding.plan import cost_of, violations
from hardware.io.errors import ConfigError
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes
from tests.support.graphs.small_graphs import mlp
from tests.unit.tuner.planners.sharding.test_pins_on_random_graphs import holds, pins_of, that_hold
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.pins import Pin, resolve_pins
from tuner.planners.sharding.recursive import refine_mesh, whole
from tuner.planners.toast.colour_actions import ColourActions
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import ToastOptions, toast_plan
from tuner.planners.toast.tree_search import SearchOptions

MUCH_S = 1e6
"""More than any step of these graphs takes."""

SMALL = ToastOptions(search=SearchOptions(trajectories=5), searches=1)


@given(data=st.data(), graph=graphs(), mesh=meshes(), is_whole=st.booleans())
def test_hard_pins_hold_in_every_state(data, graph, mesh, is_whole):
    """Whatever actions are taken under hard pins, the state's plan can run and holds all of them."""
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    pins = that_hold(data.draw(pins_of(graph, mesh)), graph, mesh, levels)
    own = resolve_pins(pins, graph, mesh, levels)
    actions = ColourActions(compatibility(named_dims(graph)), own_mesh, pins=own)
    state = actions.first
    taken = data.draw(st.lists(st.sampled_from(actions.actions), max_size=6)) if actions.actions else []
    for action in (None, *taken):
        state = state if action is None else actions.after(state, action)
        plan = actions.plan(state)

        assert all(holds(pin, plan, mesh) for pin in pins)
        assert violations(plan) == ()


@given(data=st.data(), graph=graphs(), mesh=meshes(max_axes=2), is_whole=st.booleans())
@settings(max_examples=20)
def test_hard_pins_hold_to_the_end(data, graph, mesh, is_whole):
    """Scripts, search, edits and polish keep hard pins, and the plan is no faster than the bound; with soft pins of no
    weight, which split classes all the same, the search ends no worse than what it began with.
    """
    own_mesh, levels = (whole if is_whole else refine_mesh)(mesh)
    pins = that_hold(data.draw(pins_of(graph, mesh)), graph, mesh, levels)
    soft_pins = [replace(pin, weight_s=0.0) for pin in pins]
    found, soft = (
        toast_plan(graph, own_mesh, SMALL, pins=resolve_pins(each, graph, mesh, levels)) for each in (pins, soft_pins)
    )

    assert all(holds(pin, found.plan, mesh) for pin in pins)
    assert violations(found.plan) == violations(soft.plan) == ()
    assert found.bound_s <= cost_of(found.plan).step_time_s * (1 + 1e-9)
    assert soft.steps[0].figures.step_time_s >= cost_of(soft.plan).step_time_s * (1 - 1e-9)


def test_a_soft_pin_of_great_weight_holds():
    """On a perceptron a soft pin that weighs more than any step is kept, and it is told what it has cost."""
    graph, mesh = mlp(), mesh_of(2, 2)
    pin = Pin(op="0.up", dim="hidden", axis="model", weight_s=MUCH_S)
    found = plan_graph(graph, mesh, PlannerOptions(planner="toast", whole_axes=True, pins=(pin,)))

    assert [report.is_held for report in found.found.reports] == [True]
    assert found.bound_s <= found.cost.step_time_s


@pytest.mark.slow
@given(graph=graphs(max_ops=4), mesh=meshes(max_axes=2), share=st.floats(0.2, 1.0))
@settings(max_examples=15)
def test_toast_fits_where_the_descent_fits(graph, mesh, share):
    """Below any limit where the descent finds a plan TOAST does, and what it finds is below the limit."""
    memory_bytes = share * plan_graph(graph, mesh, PlannerOptions(planner="descent")).cost.peak_memory_bytes
    assume(memory_bytes > 0)
    plans = {}
    for planner in ("descent", "toast"):
        with contextlib.suppress(ConfigError):
            plans[planner] = plan_graph(graph, mesh, PlannerOptions(planner=planner, memory_bytes=memory_bytes))

    assert "toast" in plans or not plans
    assert all(found.cost.peak_memory_bytes <= memory_bytes for found in plans.values())


def test_toast_says_what_fits():
    """Below what any plan needs the message names the limit and the least that was found."""
    with pytest.raises(ConfigError, match=r"memory_gib.*least"):
        plan_graph(mlp(), mesh_of(2, 2), PlannerOptions(planner="toast", memory_bytes=1.0))


def test_a_plan_that_fits_comes_first():
    """A plan just above the memory of a device is not taken for its time where another fits."""
    graph, mesh = mlp(), mesh_of(2, 2)
    roomy = toast_plan(graph, mesh, replace(SMALL, memory_bytes=1e15))
    just_less = np.nextafter(cost_of(roomy.plan).peak_memory_bytes, 0.0)
    tight = toast_plan(graph, mesh, replace(SMALL, memory_bytes=float(just_less)))

    assert cost_of(tight.plan).peak_memory_bytes <= just_less
