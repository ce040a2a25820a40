"""Order of a step as the room records it."""

import pytest

torch = pytest.importorskip("torch")

from tuner.rehearsal.torch_room.order import Order, moved_bytes  # noqa: E402 - it needs torch

pytestmark = pytest.mark.slow  # torch is optional


def test_equal_kinds_have_one_number():
    """The order names each kind once, and a wait names the collective by its place."""
    order = Order()
    order.operator("mm", ((2, 2), (2, 2)), 24)
    order.collective("allreduce_", 16, (0, 1), -1)
    order.operator("mm", ((2, 2), (2, 2)), 24)
    order.collective("allreduce_", 16, (0, 1), -1)
    order.waited(1)
    order.waited(0)

    assert list(order.kinds) == [("mm", ((2, 2), (2, 2)), 24), ("allreduce_", 16, (0, 1), -1)]
    assert order.steps == [0, 1, 0, 1, -2, -1]


def test_a_fused_function_is_one_operator():
    """It reads its arguments and writes its result; what it calls inside is left out."""
    order = Order()

    def inside(x):
        order.operator("mul", ((4,),), 32)
        return x * 2

    order.fuse(inside)(torch.ones(4))

    assert list(order.kinds) == [("fused", (), 2 * 4 * 4)]


def test_a_new_step_forgets_the_one_before():
    """Collectives count from 0 again, and kinds keep their numbers."""
    order = Order()
    order.operator("mm", ((2, 2),), 8)
    order.collective("allreduce_", 16, (0, 1), -1)
    order.begin_step()
    order.collective("allreduce_", 16, (0, 1), -1)

    assert (order.steps, order.collectives) == ([1], 1)


def test_rows_that_are_picked_do_not_move_the_whole_table():
    """Of an embedding of a million rows eight are read and written."""
    table, rows = torch.empty(1_000_000, 4), torch.empty(8, 4)

    assert moved_bytes("aten.embedding.default", ((table, torch.empty(8)), {}), rows) == 2 * 8 * 4 * 4
    assert moved_bytes("aten.add.Tensor", ((rows, rows), {}), rows) == 3 * 8 * 4 * 4
