"""Graphs: who makes and who reads a tensor, and the mistakes that a builder tells."""

import pytest
from hypothesis import given, settings

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, GraphBuilder, TensorKind, Use
from tests.support.graphs.random_graphs import graphs
from tests.support.graphs.small_graphs import mlp

SIZES = {"a": 4, "b": 6}


@pytest.fixture
def builder():
    """A builder with one input of 4 by 6."""
    graph = GraphBuilder(name="test")
    graph.source(INPUT, "x", (4, 6), 2, TensorKind.DATA, ("a", "b"))
    return graph


def activation(builder, name, shape=(4, 6)):
    """A tensor that some operator will write."""
    return builder.tensor(name, shape, 2, TensorKind.ACTIVATION)


def test_makers_and_uses_are_found(builder):
    """A tensor knows which result of which operator it is, and where it is read, in the order of the operators."""
    y, z = activation(builder, "y"), activation(builder, "z", (4,))
    builder.op("split", "split", (0,), (y, z), rule_of("a b -> a b, a", SIZES))
    builder.op("twice", "add", (y, y), (activation(builder, "w"),), rule_of("a b, a b -> a b", SIZES))
    graph = builder.done()

    assert graph.maker == ((0, 0), (1, 0), (1, 1), (2, 0))
    assert graph.uses[0] == (Use(op=1, operand=0),)
    assert graph.uses[y] == (Use(op=2, operand=0), Use(op=2, operand=1))
    assert graph.uses[z] == ()


def test_a_kept_state_reads_what_the_step_makes_of_it(builder):
    """`keep` makes the state read a later tensor, dim by dim."""
    weight = builder.source(STATE, "w", (4, 6), 2, TensorKind.PARAMETER)
    new = activation(builder, "new")
    builder.op("update", "add", (weight, 0), (new,), rule_of("a b, a b -> a b", SIZES))
    builder.keep(weight, new)
    graph = builder.done()

    assert graph.ops[1].operands == (new,)
    assert graph.ops[1].rule.operand_dims == ((0, 1),)
    assert graph.uses[new] == (Use(op=1, operand=0, is_back=True),)


def test_a_state_without_keep_stays_as_it_is(builder):
    """A state that nothing is made of reads nothing."""
    builder.source(STATE, "w", (4,), 2, TensorKind.PARAMETER)

    assert builder.done().ops[1].operands == ()


def test_sources_are_told(builder):
    """States, inputs and constants are sources, and all else is not."""
    builder.source(STATE, "w", (4,), 2, TensorKind.PARAMETER)
    builder.source(CONSTANT, "mask", (4,), 2, TensorKind.CONSTANT)
    builder.op("copy", "copy", (0,), (activation(builder, "y"),), rule_of("a b -> a b", SIZES))

    assert [op.is_source for op in builder.done().ops] == [True, True, True, False]


def test_bytes_of_a_tensor():
    """A tensor takes the bytes of its elements, and a scalar those of one."""
    builder = GraphBuilder(name="test")
    for name, shape in (("x", (4, 6)), ("scalar", ())):
        builder.source(INPUT, name, shape, 2, TensorKind.DATA)

    assert [tensor.num_bytes for tensor in builder.done().tensors] == [48, 2]


def test_a_rule_must_fit_its_tensors(builder):
    """A rule that gives another shape than a tensor has is refused."""
    with pytest.raises(AssertionError, match=r"the rule of 'bad' has the shapes"):
        builder.op("bad", "add", (0,), (activation(builder, "y", (6, 4)),), rule_of("a b -> a b", SIZES))


def test_names_are_unique(builder):
    """Neither tensors nor operators share a name."""
    with pytest.raises(AssertionError, match="'x' is a tensor already"):
        activation(builder, "x")
    builder.op("y", "copy", (0,), (activation(builder, "y"),), rule_of("a b -> a b", SIZES))
    with pytest.raises(AssertionError, match="'y' is an operator already"):
        builder.op("y", "copy", (0,), (activation(builder, "z"),), rule_of("a b -> a b", SIZES))


def test_tensors_are_written_before_they_are_read(builder):
    """An operator can't read what a later one writes."""
    late = activation(builder, "late")
    builder.op("first", "copy", (late,), (activation(builder, "y"),), rule_of("a b -> a b", SIZES))
    builder.op("second", "copy", (0,), (late,), rule_of("a b -> a b", SIZES))

    with pytest.raises(AssertionError, match="'first' reads 'late' before it is written"):
        builder.done()


def test_tensors_are_written_once(builder):
    """Two operators can't write one tensor."""
    y = activation(builder, "y")
    for name in ("first", "second"):
        builder.op(name, "copy", (0,), (y,), rule_of("a b -> a b", SIZES))

    with pytest.raises(AssertionError, match="'y' is written twice"):
        builder.done()


def test_every_tensor_is_written(builder):
    """A tensor that nobody writes is a mistake of ours."""
    activation(builder, "y")

    with pytest.raises(AssertionError, match="every tensor needs an operator"):
        builder.done()


def test_a_state_keeps_its_shape(builder):
    """What the step makes of a state is as large as it."""
    weight = builder.source(STATE, "w", (6,), 2, TensorKind.PARAMETER)

    with pytest.raises(AssertionError, match="'w' must keep its shape"):
        builder.keep(weight, 0)


@given(graph=graphs())
@settings(max_examples=100, deadline=None)
def test_makers_and_uses_are_the_ops_own(graph):
    """Makers and uses of tensors say what results and operands of operators say."""
    assert all(graph.ops[op].results[slot] == tensor for tensor, (op, slot) in enumerate(graph.maker))
    assert sorted((use.op, use.operand) for uses in graph.uses for use in uses) == [
        (number, slot) for number, op in enumerate(graph.ops) for slot in range(len(op.operands))
    ]


def test_layers_of_an_mlp_add_up():
    """A layer of the small graph has fourteen operators, and the step an input and a loss."""
    assert [len(mlp(num_layers=count).ops) for count in (1, 2, 5)] == [16, 30, 72]
