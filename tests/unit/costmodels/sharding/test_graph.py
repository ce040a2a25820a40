"""Graphs: who makes and who reads a tensor, and the mistakes that a builder tells."""

import pytest
from hypothesis import given

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, STATE, GraphBuilder, TensorKind, Use
from tests.support.graphs.random_graphs import graphs

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


def copy(builder, name, source, result):
    """An operator that copies a tensor."""
    builder.op(name, "copy", (source,), (result,), rule_of("a b -> a b", SIZES))


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


def test_shapes_must_fit(builder):
    """A rule must give the shape that a tensor has; what the step makes of a state is as large as the state."""
    weight = builder.source(STATE, "w", (6,), 2, TensorKind.PARAMETER)

    with pytest.raises(AssertionError, match=r"the rule of 'bad' has the shapes"):
        copy(builder, "bad", 0, activation(builder, "y", (6, 4)))
    with pytest.raises(AssertionError, match="'w' must keep its shape"):
        builder.keep(weight, 0)


def test_names_are_unique(builder):
    """Neither tensors nor operators share a name."""
    with pytest.raises(AssertionError, match="'x' is a tensor already"):
        activation(builder, "x")
    copy(builder, "y", 0, activation(builder, "y"))
    with pytest.raises(AssertionError, match="'y' is an operator already"):
        copy(builder, "y", 0, activation(builder, "z"))


def test_tensors_are_written_before_they_are_read(builder):
    """A tensor that nobody writes, or a later operator than the one that reads it, is a mistake of ours."""
    late = activation(builder, "late")

    with pytest.raises(AssertionError, match="every tensor needs an operator"):
        builder.done()
    copy(builder, "first", late, activation(builder, "y"))
    copy(builder, "second", 0, late)
    with pytest.raises(AssertionError, match="'first' reads 'late' before it is written"):
        builder.done()


def test_tensors_are_written_once(builder):
    """Two operators can't write one tensor."""
    y = activation(builder, "y")
    copy(builder, "first", 0, y)
    copy(builder, "second", 0, y)

    with pytest.raises(AssertionError, match="'y' is written twice"):
        builder.done()


@given(graph=graphs())
def test_makers_and_uses_are_the_ops_own(graph):
    """Makers and uses of tensors say what results and operands of operators say."""
    assert all(graph.ops[op].results[slot] == tensor for tensor, (op, slot) in enumerate(graph.maker))
    assert sorted((use.op, use.operand) for uses in graph.uses for use in uses) == [
        (number, slot) for number, op in enumerate(graph.ops) for slot in range(len(op.operands))
    ]
