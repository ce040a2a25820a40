"""What goes through memory where a compiler fuses: chains, products, sums, views and places, counted by hand."""

import pytest
from hypothesis import given

from costmodels.sharding.dims import rule_of
from costmodels.sharding.fusion import Lifetime, lifetimes, traffic_of
from costmodels.sharding.graph import INPUT, STATE, FusionKind, GraphBuilder, TensorKind
from tests.support.graphs.random_graphs import graphs

SIZES = {"rows": 64, "rows2": 64, "columns": 32, "few": 4}
PAIR = "rows columns -> rows columns"
WHOLE = 4.0 * 64 * 32
"""Bytes of a float32 array of all rows and columns."""

LOOP, SUM, VIEW, PICK, PUT, STACK, NONE = (
    FusionKind.LOOP,
    FusionKind.SUM,
    FusionKind.VIEW,
    FusionKind.PICK,
    FusionKind.PUT,
    FusionKind.STACK,
    FusionKind.NONE,
)


class Steps:
    """A graph that grows by one operator at a time."""

    def __init__(self):
        self.graph = GraphBuilder(name="steps")

    def source(self, name, dims="rows columns", primitive=INPUT):
        """Add a source."""
        shape = [SIZES[dim] for dim in dims.split()]
        return self.graph.source(primitive, name, shape, 4, TensorKind.DATA)

    def op(self, name, operands, pattern, fusion, *, times=1):
        """Add an operator."""
        rule = rule_of(pattern, SIZES)
        result = self.graph.tensor(name, rule.result_shape(0), 4, TensorKind.ACTIVATION)
        self.graph.op(name, name, operands, [result], rule, fusion=fusion, times=times)
        return result

    def each(self, name, *operands, **details):
        """Add an elementwise operator."""
        sides = ", ".join(["rows columns"] * len(operands))
        return self.op(name, operands, f"{sides} -> rows columns", LOOP, **details)

    def traffic(self):
        """The bytes that each operator reads and writes, by its name, where there are any."""
        graph = self.graph.done()
        found = zip(graph.ops, traffic_of(graph), strict=True)
        return {
            op.name: (sum(one.reads), sum(one.writes))
            for op, one in found
            if not op.is_source and (any(one.reads) or any(one.writes))
        }

    def lives(self):
        """First and last operator of what takes memory, by the names of tensors and operators, without sources."""
        graph = self.graph.done()
        name = [op.name for op in graph.ops]
        found = zip(graph.tensors, lifetimes(graph), strict=True)
        return {
            tensor.name: (name[life.first], name[life.last])
            for tensor, life in found
            if life is not None and not name.index(tensor.name) < sum(op.begins for op in graph.ops)
        }


def test_a_chain_of_elementwise_operators_pays_one_round_trip():
    """Three elementwise operators in a row read their input once and write the last result only."""
    steps = Steps()
    steps.each("c", steps.each("b", steps.each("a", steps.source("x"))))

    assert steps.traffic() == {"a": (WHOLE, 0.0), "c": (0.0, WHOLE)}


def test_a_kernel_reads_a_tensor_once():
    """Two operators of a chain that read the same input pay for it together."""
    steps = Steps()
    x = steps.source("x")
    steps.each("b", steps.each("a", x), x)

    assert steps.traffic() == {"a": (WHOLE, 0.0), "b": (0.0, WHOLE)}


def test_a_product_stands_between_kernels():
    """A product reads and writes memory, and so does what both it and a later operator read."""
    steps = Steps()
    a = steps.each("a", steps.source("x"))
    product = steps.op("product", [a], "rows columns -> rows columns", NONE)
    steps.each("b", a, product)

    assert steps.traffic() == {"a": (WHOLE, WHOLE), "product": (WHOLE, WHOLE), "b": (2 * WHOLE, WHOLE)}


def test_an_operator_runs_where_its_only_reader_does():
    """What only a kernel behind a product reads is computed there, and is not written before."""
    steps = Steps()
    x = steps.source("x")
    a = steps.each("a", x)
    steps.each("b", a, steps.op("product", [x], "rows columns -> rows columns", NONE))

    assert steps.traffic() == {"a": (WHOLE, 0.0), "product": (WHOLE, WHOLE), "b": (WHOLE, WHOLE)}


def test_a_sum_ends_the_kernel_that_it_joins():
    """A sum computes what it adds up by itself, and its readers need another kernel."""
    steps = Steps()
    x = steps.source("x")
    total = steps.op("sum", [steps.each("a", x)], "rows columns -> rows", SUM)
    steps.op("b", [x, total], "rows columns, rows -> rows columns", LOOP)
    row = 4.0 * 64

    assert steps.traffic() == {"a": (WHOLE, 0.0), "sum": (0.0, row), "b": (WHOLE + row, WHOLE)}


def test_views_move_nothing_and_hide_nothing():
    """A transposed result is read as it lies: it stays inside a kernel, and a product still needs it written."""
    steps = Steps()
    view = steps.op("view", [steps.each("a", steps.source("x"))], "rows columns -> columns rows", VIEW)
    steps.op("b", [view], "columns rows -> columns rows", LOOP)
    other = steps.op("other", [steps.each("c", steps.source("y"))], "rows columns -> columns rows", VIEW)
    steps.op("product", [other], "columns rows -> columns rows", NONE)

    assert steps.traffic() == {"a": (WHOLE, 0.0), "b": (0.0, WHOLE), "c": (WHOLE, WHOLE), "product": (WHOLE, WHOLE)}


def test_a_part_is_read_or_written_alone():
    """A slice reads what it returns, and an update in place writes what it is given."""
    steps = Steps()
    x = steps.source("x")
    part = steps.op("slice", [x], "rows columns -> few columns", PICK)
    steps.op("put", [steps.source("y"), part], "rows columns, few columns -> rows columns", PUT)
    few = 4.0 * 4 * 32

    assert steps.traffic() == {"slice": (few, few), "put": (few, few)}


def test_what_the_next_step_reads_is_written():
    """The updated value of a state goes to memory, although a later operator of its kernel reads it too."""
    steps = Steps()
    state = steps.source("w", primitive=STATE)
    updated = steps.each("a", state)
    steps.graph.keep(state, updated)
    steps.each("b", updated)

    assert steps.traffic() == {"a": (WHOLE, WHOLE), "b": (0.0, WHOLE)}


def test_loops_end_kernels():
    """An operator that runs more often than the one before does not join it."""
    steps = Steps()
    steps.each("b", steps.each("a", steps.source("x")), times=3)

    assert steps.traffic() == {"a": (WHOLE, WHOLE), "b": (WHOLE, WHOLE)}


def test_each_stack_of_a_loop_has_a_kernel():
    """An iteration adds to a stack by a kernel of its own, which moves as much; parts are read where needed."""
    steps = Steps()
    x = steps.op("loop_unstack", [steps.source("x")], "rows columns -> few columns", PICK, times=16)
    a = steps.op("a", [x], "few columns -> few columns", LOOP, times=16)
    steps.op("b", [a], "few columns -> few columns", LOOP, times=16)
    steps.op("loop_stack", [a], "few columns -> rows few columns", STACK, times=16)
    few = 4.0 * 4 * 32
    graph = steps.graph.done()
    launches = {op.name: one.launches for op, one in zip(graph.ops, traffic_of(graph), strict=True)}

    assert steps.traffic() == {"loop_unstack": (few, 0.0), "b": (0.0, few), "loop_stack": (few, few)}
    assert launches == {"x": 0, "loop_unstack": 0, "a": 0, "b": 1, "loop_stack": 1}


def test_an_addition_ends_a_product():
    """A product adds a matrix or a vector to its result before it writes it, if nothing else reads the result."""
    steps = Steps()
    x, bias = steps.source("x"), steps.source("bias", "columns")
    product = steps.op("dot_general", [x], "rows columns -> rows columns", NONE)
    rows = steps.op("broadcast_in_dim", [bias], "columns -> rows columns", LOOP)
    steps.op("c", [steps.op("add", [product, rows], "rows columns, rows columns -> rows columns", LOOP)], PAIR, LOOP)
    vector = 4.0 * 32
    graph = steps.graph.done()
    launches = sum(one.launches for one in traffic_of(graph))

    assert steps.traffic() == {
        "dot_general": (WHOLE, 0.0),
        "broadcast_in_dim": (vector, 0.0),
        "add": (0.0, WHOLE),
        "c": (WHOLE, WHOLE),
    }
    assert launches == 2


@pytest.mark.parametrize("others", ["view", "reader"])
def test_an_addition_ends_no_product_that_is_turned_or_read_elsewhere(others):
    """XLA adds to what a product writes only as it lies, and only where nobody else wants it."""
    steps = Steps()
    x, y = steps.source("x", "rows rows"), steps.source("y", "rows rows")
    product = steps.op("dot_general", [x], "rows rows2 -> rows rows2", NONE)
    added = steps.op("transpose", [product], "rows rows2 -> rows2 rows", VIEW) if others == "view" else product
    steps.op("add", [y, added], "rows rows2, rows rows2 -> rows rows2", LOOP)
    if others == "reader":
        steps.op("second", [product], "rows rows2 -> rows rows2", NONE)
    square = 4.0 * 64 * 64

    assert steps.traffic()["dot_general"] == (square, square)
    assert steps.traffic()["add"] == (2 * square, square)


@given(graphs())
def test_fusion_never_moves_more(graph):
    """No operator reads more than its operands or writes more than its results, and what leaves a step is written."""
    for op, one in zip(graph.ops, traffic_of(graph), strict=True):
        sizes = [graph.tensors[tensor].num_bytes for tensor in (*op.operands, *op.results)]
        assert all(0 <= moved <= size for moved, size in zip((*one.reads, *one.writes), sizes, strict=True))
        if op.fusion is FusionKind.NONE:
            assert one.writes == tuple(sizes[len(op.operands) :])


def test_memory_holds_what_leaves_a_kernel():
    """Neither the inside of a chain nor a view takes memory; what the view shows lives until its reader has run."""
    steps = Steps()
    product = steps.op("product", [steps.source("x")], "rows columns -> rows columns", NONE)
    view = steps.op("view", [product], "rows columns -> columns rows", VIEW)
    a = steps.op("a", [view], "columns rows -> columns rows", LOOP)
    b = steps.op("b", [a], "columns rows -> columns rows", LOOP)
    steps.op("second", [b], "columns rows -> columns rows", NONE)

    assert steps.lives() == {"product": ("product", "b"), "b": ("b", "second"), "second": ("second", "second")}


def test_what_is_computed_anew_is_not_kept():
    """A cheap result that kernels before and behind a product read is computed in both, from what it is made of."""
    steps = Steps()
    x = steps.op("x1", [steps.source("x")], "rows columns -> rows columns", NONE)
    cheap = steps.each("cheap", x)
    first = steps.op("first", [steps.each("a", cheap)], "rows columns -> rows columns", NONE)
    steps.each("b", cheap, first)

    assert steps.lives()["x1"] == ("x1", "b")
    assert "cheap" not in steps.lives()


def test_what_is_dear_is_kept():
    """A result that takes longer to compute than to read is kept for the kernel behind a product."""
    steps = Steps()
    x = steps.op("x1", [steps.source("x")], "rows columns -> rows columns", NONE)
    dear = steps.each("tanh", x)
    first = steps.op("first", [steps.each("a", dear)], "rows columns -> rows columns", NONE)
    steps.each("b", dear, first)

    assert steps.lives()["tanh"] == ("a", "b")
    assert steps.lives()["x1"] == ("x1", "a")


def test_an_update_in_place_takes_over_its_target():
    """What is updated and not read again ends with the update."""
    steps = Steps()
    target = steps.op("target", [steps.source("x")], "rows columns -> rows columns", NONE)
    steps.op("put", [target, steps.source("y", "few columns")], "rows columns, few columns -> rows columns", PUT)

    assert steps.lives() == {"target": ("target", "target"), "put": ("put", "put")}


@given(graphs())
def test_lives_begin_before_they_end(graph):
    """A tensor lives within the step, from its maker at the earliest, and sources live all step long."""
    whole = Lifetime(first=0, last=len(graph.ops) - 1)
    for tensor, life in enumerate(lifetimes(graph)):
        maker, _ = graph.maker[tensor]
        if graph.ops[maker].begins:
            assert life == whole
        elif life is not None:
            assert maker <= life.first <= life.last <= whole.last
