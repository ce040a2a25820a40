"""Which indices of a dim a device holds: parts are whole, alike at every operator, and inside of each other."""

import itertools
import math
from functools import cache

import numpy as np
import pytest

from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.layouts import PARTIAL, REPLICATED
from costmodels.sharding.plan import NONE
from tests.support.programs.sharded_steps import GPT, LLAMA, MIXTRAL, ONE_KEY, by_chance, of_planner, of_study, wide
from trials.torch_training.planned.digits import digits_of, overlap

PLANS = {
    "gpt by hand": lambda: of_study(GPT, 8, dp=2, tp=4),
    "llama by hand": lambda: of_study(LLAMA, 8, cp=2, up=2, tp=2),
    "llama by descent": lambda: of_planner(wide(LLAMA), "descent", (2, 2, 2)),
    "gpt by chance": lambda: by_chance(GPT, 0),
    "one key head, by chance": lambda: by_chance(ONE_KEY, 1),
    "without digits for all": lambda: by_chance(MIXTRAL, 6),
}
REALISED = list(PLANS)[:5]


@cache
def digits(name):
    """Find the digits of a plan once."""
    return digits_of(PLANS[name]())


def places(plan):
    """Return the coordinates of all devices."""
    return list(itertools.product(*map(range, plan.mesh.sizes)))


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_of_a_dim_are_equal_and_make_up_the_whole(name):
    """Under every layout, equally many devices hold each index of a dim: one for each index of the other axes."""
    found = digits(name)
    plan = found.plan
    for tensor, array in enumerate(plan.graph.tensors):
        layout = plan.layout(tensor)
        for dim, size in enumerate(array.shape):
            parts = [found.indices(tensor, dim, layout, place) for place in places(plan)]
            copies = plan.mesh.num_devices * len(parts[0]) / size
            assert np.bincount(np.concatenate(parts), minlength=size).tolist() == [copies] * size


@pytest.mark.parametrize("name", PLANS)
def test_a_factor_has_the_same_part_in_all_tensors_of_an_operator(name):
    """Where axes serve a factor, the operands and results that carry it alone on a dim hold the same indices."""
    found = digits(name)
    plan = found.plan
    for number, op in enumerate(plan.graph.ops):
        served = set(plan.served[number].tolist()) - {NONE}
        sides = [(tensor, op.rule.operands[slot], plan.wanted(number, slot)) for slot, tensor in enumerate(op.operands)]
        sides += [(tensor, op.rule.results[slot], plan.written(number, slot)) for slot, tensor in enumerate(op.results)]
        for factor, place in itertools.product(served, places(plan)):
            parts = {
                tuple(found.indices(tensor, dims.index((factor,)), layout, place))
                for tensor, dims, layout in sides
                if (factor,) in dims
            }
            assert len(parts) <= 1, op.name


@pytest.mark.parametrize("name", REALISED)
def test_what_is_sliced_is_inside_of_what_was_held(name):
    """Where a layout only adds axes, each device already holds its part, so that nothing is sent."""
    found = digits(name)
    plan = found.plan
    sliced = [
        each for each in relayouts(plan) if all(a in (-1, b) for a, b in zip(each.before, each.after, strict=True))
    ]

    assert sliced
    for each in sliced:
        for dim, place in itertools.product(range(len(plan.graph.tensors[each.tensor].shape)), places(plan)):
            before, after = (found.indices(each.tensor, dim, layout, place) for layout in (each.before, each.after))
            assert set(after) <= set(before)


def test_some_plans_have_no_digits_for_all_layouts():
    """Where operators cut a short dim by too many sets of axes, its cuts are left out, and deal contiguous parts."""
    found = digits("without digits for all")
    cuts = {
        (tensor, dim, axis)
        for tensor in range(len(found.plan.graph.tensors))
        for axis, dim in enumerate(found.plan.layout(tensor))
        if dim >= 0
    }

    assert cuts - found.above.keys()
    assert cuts & found.above.keys()


def test_sums_are_not_scattered_into_more_parts_than_a_dim_has():
    """Where two axes cut four heads and all readers want a third to do so too, the sums of that axis are added up."""
    plan = by_chance(LLAMA, 22)
    names = [array.name for array in plan.graph.tensors]
    keys = names.index("layers.0.attention.core.gradient.keys")
    written, lies = plan.written(*plan.graph.maker[keys]), plan.layout(keys)
    (axis,) = [axis for axis, dim in enumerate(written) if dim == PARTIAL]

    assert {target[axis] for target in plan.targets(keys)} == {2}
    assert lies[axis] == REPLICATED
    assert plan.graph.tensors[keys].shape[2] == math.prod(
        size for size, dim in zip(plan.mesh.sizes, lies, strict=True) if dim == 2
    )
    digits_of(plan)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [((1, 2), (2, 4), False), ((1, 4), (2, 2), True), ((4, 2), (1, 2), False)]
)
def test_digits_overlap_unless_one_is_above_the_other(one, other, expected):
    """A digit ends where the parts above it times its size are; the next one may begin there."""
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected
