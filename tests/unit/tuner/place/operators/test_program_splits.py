"""Ways to share the operators of a captured step, with what is exchanged counted by hand."""

import pytest

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, STATE, GraphBuilder, TensorKind
from tuner.place.operators.program_splits import sharings

BATCH, INNER, HIDDEN = 8, 4, 6
SIZES = {"b": BATCH, "k": INNER, "h": HIDDEN, "o": INNER}
INPUTS, FIRST, SECOND = BATCH * INNER, INNER * HIDDEN, HIDDEN * INNER
"""Bytes of the tensors, of one byte an element."""


def two_products(*, takes_maximum=False):
    """Two products, with an elementwise operator or one that needs the whole inner dim between them, and a reader."""
    graph = GraphBuilder(name="two products")
    x = graph.source(INPUT, "x", (BATCH, INNER), 1.0, TensorKind.DATA)
    weights = [
        graph.source(STATE, name, shape, 1.0, TensorKind.PARAMETER)
        for name, shape in (("first", (INNER, HIDDEN)), ("second", (HIDDEN, INNER)))
    ]

    def add(name, pattern, operands, shape, blocked=()):
        made = graph.tensor(name, shape, 1.0, TensorKind.ACTIVATION)
        graph.op(name, name, operands, (made,), rule_of(pattern, SIZES, blocked=blocked), flop=float(BATCH))
        return made

    up = add("up", "b k, k h -> b h", (x, weights[0]), (BATCH, HIDDEN))
    blocked = ("h",) if takes_maximum else ()
    active = add("active", "b h -> b h", (up,), (BATCH, HIDDEN), blocked=blocked)
    down = add("down", "b h, h o -> b o", (active, weights[1]), (BATCH, INNER))
    add("reader", "b o -> b o", (down,), (BATCH, INNER))
    for weight in weights:
        graph.keep(weight, weight)
    return graph.done()


def shared(graph, group, parts=2):
    """What each way to share some operators exchanges, by the cut factor of each operator."""
    number = {op.name: at for at, op in enumerate(graph.ops)}
    found = {}
    for one in sharings(graph, [number[name] for name in group], parts, frozenset()):
        cut = {graph.ops[op].name: graph.ops[op].rule.factors[factor].name for op, factor in one.colour.items()}
        found[tuple(sorted(cut.items()))] = (one.received_bytes, one.exchanged_bytes, one.meetings)
    return found


def test_a_product_is_cut_along_each_of_its_dims():
    """Rows and columns come back in parts, a sum as a whole, and what has no part of the dim is sent as a whole."""
    found = shared(two_products(), ["up"])
    made = BATCH * HIDDEN

    assert found == {
        (("up", "b"),): (INPUTS / 2 + FIRST, INPUTS / 2 + FIRST + made / 2, 2),
        (("up", "h"),): (INPUTS + FIRST / 2, INPUTS + FIRST / 2 + made / 2, 2),
        (("up", "k"),): (INPUTS / 2 + FIRST / 2, INPUTS / 2 + FIRST / 2 + made, 2),
    }


def test_two_products_share_the_dim_between_them():
    """Columns of the first and rows of the second weight: nothing meets in between, and one sum comes back."""
    found = shared(two_products(), ["up", "active", "down"])
    received = INPUTS + FIRST / 2 + SECOND / 2

    assert found[("active", "h"), ("down", "h"), ("up", "h")] == (received, received + BATCH * INNER, 2)
    assert found[("active", "b"), ("down", "b"), ("up", "b")] == (
        INPUTS / 2 + FIRST + SECOND,
        INPUTS / 2 + FIRST + SECOND + BATCH * INNER / 2,
        2,
    )


def test_what_the_group_needs_as_a_whole_is_put_together_meanwhile():
    """Where an operator needs the whole dim, home collects the parts, and sends all of them to everybody."""
    found = shared(two_products(takes_maximum=True), ["up", "active"])
    made = BATCH * HIDDEN

    received, exchanged, meetings = found[("up", "h"),]
    assert received == INPUTS + FIRST / 2 + made
    assert exchanged == INPUTS + FIRST / 2 + made / 2 + made
    assert meetings == 2  # before the run and in its middle; the result is whole at home


def test_a_sum_that_the_group_reads_is_added_up_meanwhile():
    """A partial sum goes home, and its sum back in the parts or as the whole that is read."""
    received, exchanged, meetings = shared(two_products(), ["up", "active"])[("up", "k"),]
    made = BATCH * HIDDEN

    assert received == INPUTS / 2 + FIRST / 2 + made
    assert exchanged == INPUTS / 2 + FIRST / 2 + 2 * made
    assert meetings == 2


@pytest.mark.parametrize(("parts", "cuts"), [(2, {"b", "h", "k"}), (4, {"b", "k"}), (8, {"b"}), (16, set())])
def test_parts_are_equal(parts, cuts):
    """A dim is cut only into numbers of parts that divide it."""
    found = shared(two_products(), ["up"], parts)

    assert {dict(cut)["up"] for cut in found} == cuts


def test_several_parts_pass_one_adapter():
    """With four devices home sends three parts of the batch and gets three back, and weights go round once."""
    received, exchanged, _ = shared(two_products(), ["up"], 4)[("up", "b"),]

    assert received == INPUTS / 4 + FIRST
    assert exchanged == 3 / 4 * INPUTS + FIRST + 3 / 4 * BATCH * HIDDEN
