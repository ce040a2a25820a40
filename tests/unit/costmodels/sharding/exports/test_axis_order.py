"""The order of axes on a dim: parts stay where the plan has them, or the place is named."""

import math

import numpy as np
import pytest
from hypothesis import given

from costmodels.sharding.exports.axis_order import axis_orders
from costmodels.sharding.exports.jax_specs import jax_specs
from costmodels.sharding.exports.layout_changes import sends_as_planned
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.exports.torch_placements import torch_placements
from costmodels.sharding.layouts import PARTIAL
from tests.support.graphs.named_plans import mesh_of
from tests.support.graphs.random_graphs import plans
from tests.support.graphs.shared_factors import contested_plan, served_together
from tests.support.graphs.small_graphs import mlp


def parts(axes, sizes, shape):
    """The elements of each dim that each device has where parts are contiguous, axes major to minor [devices][dims]."""
    found = []
    for device in range(math.prod(sizes)):
        place = np.unravel_index(device, sizes)
        held = []
        for size, order in zip(shape, axes, strict=True):
            ways = [sizes[axis] for axis in order]
            part = int(np.ravel_multi_index([place[axis] for axis in order], ways)) if order else 0
            length = size // math.prod(ways)
            held.append(frozenset(range(part * length, (part + 1) * length)))
        found.append(held)
    return found


def elements(held):
    """The parts of all dims as one set."""
    return {(dim, index) for dim, indices in enumerate(held) for index in indices}


def deals(layout, sizes, shape):
    """Whether every dim falls into equal parts."""
    ways = [math.prod(size for dim, size in zip(layout, sizes, strict=True) if dim == at) for at in range(len(shape))]
    return all(size % count == 0 for size, count in zip(shape, ways, strict=True))


@pytest.mark.slow
@given(plan=plans())
def test_slices_move_nothing_and_gathers_stay_in_their_group(plan):
    """Wherever no place is named, a device that slices has what it keeps, and a group that gathers has what it wants.

    Every dim is cut by the axes of the plan, each once, whatever their order. Contiguous parts are dealt out by hand.
    Sums that two axes deal out together may leave parts that do not divide a dim; libraries pad these, and they are
    left out here.
    """
    orders, sizes = axis_orders(plan), plan.mesh.sizes
    for tensor in range(len(plan.graph.tensors)):
        assert [set(axes) for axes in orders.lying(tensor)] == [
            {plan.mesh.names.index(name) for name in names} for names in plan.dims_of(tensor)
        ]
    for change in relayouts(plan):
        if (change.tensor, change.op) in orders.broken or PARTIAL in change.before:
            continue
        shape = plan.graph.tensors[change.tensor].shape
        if not all(deals(layout, sizes, shape) for layout in (change.before, change.after)):
            continue
        before = parts(orders.lying(change.tensor), sizes, shape)
        after = parts(orders.read(change.op, change.slot), sizes, shape)
        pairs = list(zip(change.before, change.after, strict=True))
        if all(old in (new, -1) for old, new in pairs):
            assert all(elements(new) <= elements(old) for old, new in zip(before, after, strict=True))
        if all(new in (old, -1) for old, new in pairs):
            gathered = [axis for axis, (old, new) in enumerate(pairs) if old != new]
            for device, wanted in enumerate(after):
                place = np.unravel_index(device, sizes)
                group = [
                    other
                    for other in range(len(after))
                    if all(
                        one == another
                        for axis, (one, another) in enumerate(zip(place, np.unravel_index(other, sizes), strict=True))
                        if axis not in gathered
                    )
                ]
                assert set.union(*(elements(before[other]) for other in group)) == elements(wanted)


STATES = ("0.w[12]", "0.w[12].m", "*.update")


def test_tensor_parallelism_under_sharded_parameters_is_major():
    """A weight's ffn that both axes cut and data gathers has the model axis first, though the mesh has it last."""
    plan = served_together(
        mlp(batch=64, hidden=64, ffn=256),
        mesh_of(data=2, model=4),
        data=[*((each, ("ffn",)) for each in STATES), ("*", ("batch",))],
        model=[("*", ("ffn",))],
    )
    specs = jax_specs(plan)

    assert specs.broken == ()
    assert specs.arguments["0.w1"] == ((), ("model", "data"))
    assert [each.spec for each in specs.constraints if each.op == "0.up"] == [((), ("model",))]
    assert len(torch_placements(plan).broken) > 0


def test_an_order_that_suits_nobody_is_named():
    """A weight that one reader wants along the first axis and another along the second can't have both first."""
    plan = contested_plan()

    named = {(plan.graph.tensors[tensor].name, plan.graph.ops[op].name) for tensor, op in axis_orders(plan).broken}
    assert len(named) == 1
    assert named <= {("0.w1", "0.up"), ("0.w1", "0.up.data")}


def test_the_mesh_order_holds_what_stays_in_front():
    """Without a choice of order, what stays on a dim must be what the mesh has first."""
    changes = (((0, 0), (0, -1)), ((0, 0), (-1, 0)), ((0, 1), (1, 1)), ((-1, 0), (0, 0)), ((0, 1), (1, 0)))

    assert [sends_as_planned(*change, (8, 8), (2, 2)) for change in changes] == [True, False, False, False, True]
