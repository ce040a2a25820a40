"""What a plan moves once and what again, and how long it is kept, on a chain of four operators."""

import numpy as np
import pytest

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, STATE, GraphBuilder, TensorKind
from costmodels.sharding.plan import NONE, Plan, cost_of
from hardware.cluster_file import find_cluster

MESH = DeviceMesh(names=("axis",), sizes=(8,), cluster=find_cluster("dgx-a100"))
WEIGHT_BYTES, ROW_BYTES = 64 * 64 * 4, 64 * 4
SCALE = rule_of("rows, rows columns -> rows", {"rows": 64, "columns": 64})
PASS = rule_of("rows -> rows", {"rows": 64})


def chain(primitive, *, says_backward):
    """A matrix that a source makes, read by the first and by the last of four operators."""
    builder = GraphBuilder(name="chain")
    x = builder.source(INPUT, "x", (64,), 4, TensorKind.DATA, ("rows",))
    for name in ("first", "second", "third", "fourth"):
        if name == "third" and says_backward:
            builder.begin_backward()
        y = builder.tensor(f"{name}.out", (64,), 4, TensorKind.ACTIVATION, ("rows",))
        if name in ("first", "fourth"):
            if name == "first":
                weight = builder.source(primitive, "weight", (64, 64), 4, TensorKind.PARAMETER, ("rows", "columns"))
            builder.op(name, "scale", (x, weight), (y,), SCALE)
        else:
            builder.op(name, "pass", (x,), (y,), PASS)
        x = y
    return builder.done()


def sharded(graph):
    """The plan that cuts the matrix where it is made and nothing else."""
    served = np.full((len(graph.ops), 1), NONE)
    served[next(number for number, op in enumerate(graph.ops) if op.name == "weight")] = 0
    return Plan(graph=graph, mesh=MESH, served=served)


@pytest.mark.parametrize(
    ("primitive", "says_backward", "gathers"),
    [(STATE, True, 2), (STATE, False, 1), (INPUT, True, 1), (INPUT, False, 1)],
)
def test_a_sharded_state_is_gathered_in_each_pass(primitive, says_backward, gathers):
    """What lives from step to step is gathered in each pass that reads it; all else is moved once and kept."""
    found = cost_of(sharded(chain(primitive, says_backward=says_backward))).collectives

    assert [each.move.message_bytes for each in found] == [WEIGHT_BYTES] * gathers


@pytest.mark.parametrize(("says_backward", "copies_between"), [(True, 0), (False, 1)])
def test_what_is_moved_once_takes_memory_until_it_is_read_last(says_backward, copies_between):
    """Between its readers a gathered matrix is there if it was gathered once, and is not if it is gathered again."""
    graph = chain(STATE, says_backward=says_backward)
    plan = sharded(graph)
    (weight,) = (number for number, tensor in enumerate(graph.tensors) if tensor.name == "weight")
    readers = [copy.readers for copy in plan.copies(weight)]

    alive = [sum(min(each) <= number <= max(each) for each in readers) for number in range(len(graph.ops))]
    between = [number for number, op in enumerate(graph.ops) if op.name in ("second", "third")]
    assert [alive[number] for number in between] == [copies_between] * 2
    # the data, the first operator's result, a device's own rows, and the gathered matrix
    assert cost_of(plan).peak_memory_bytes == pytest.approx(2 * ROW_BYTES + WEIGHT_BYTES / 8 + WEIGHT_BYTES, rel=0.02)
