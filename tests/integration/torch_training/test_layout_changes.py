"""Layout changes of the parts of modules that train as planned: right parts, and the bytes that plans count."""

from collections import Counter

import pytest

pytest.importorskip("torch", reason="ranks need torch: pip install 'meshtune[torch]'")

from costmodels.sharding.exports.layout_changes import sends_as_planned
from costmodels.sharding.layouts import moves
from tests.support.programs import changed_layouts
from trials.torch_training.planned.traffic import recorded_traffic

SHAPE = (8, 16)
NUM_BYTES = 8 * 16 * 8


def members(sizes, axes, rank):
    """Ranks of the group of a rank along some axes of a mesh of four."""
    if len(axes) == len(sizes):
        return (0, 1, 2, 3)
    return (rank // 2 * 2, rank // 2 * 2 + 1) if axes == (1,) else (rank % 2, rank % 2 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", changed_layouts.MESHES, ids=str)
def test_changes_send_what_plans_count(on_ranks, sizes):
    """Every part is right, and all ranks send the kinds and bytes of the plan's list on its groups, except where
    contiguous parts cannot.
    """
    told = on_ranks(4, changed_layouts.change_all, sizes)

    assert all(len(one) == changed_layouts.MESHES[sizes] for one in told)
    apart = set()
    for rank, one in enumerate(told):
        for before, after, is_right, recording in one:
            assert is_right, (before, after)
            planned = Counter()
            for move in moves(before, after, NUM_BYTES, sizes):
                planned[move.kind, members(sizes, move.axes, rank)] += move.message_bytes
            if sends_as_planned(before, after, SHAPE, sizes):
                assert recorded_traffic(recording) == planned, (before, after)
            else:
                apart.add((before, after))
    assert len(apart) == {(4,): 0, (2, 2): 30}[sizes]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", changed_layouts.DTYPES[1:])
def test_all_types_move(on_ranks, dtype):
    """Integers, half precision, booleans and complex numbers, also lazy conjugates, change their layout too."""
    assert all(is_right for one in on_ranks(4, changed_layouts.change_all, (2, 2), dtype) for _, _, is_right, _ in one)
