"""D-Rec's symbolic prices: volumes by hand, blind to links and devices."""

import pytest

from benchmarks.papers.symbolic_prices import READINGS, Volumes
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import CONSTANT, INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import NONE
from hardware.cluster_file import find_cluster
from tests.support.graphs.random_graphs import mesh_of
from tuner.planners.sharding.recursive import ORDERS, _Cut, _Progress, recursive_plan, refine_mesh

ROWS, INNER, COLUMNS = 8, 16, 6
SIZES = {"i": ROWS, "k": INNER, "j": COLUMNS}


def product(*, flop=1.0):
    """A source x of i by k, weights of k by j, their product y, and an operator that passes y on."""
    graph = GraphBuilder(name="product")
    x = graph.source(INPUT, "x", (ROWS, INNER), 2.0, TensorKind.DATA)
    w = graph.source(CONSTANT, "w", (INNER, COLUMNS), 2.0, TensorKind.PARAMETER)
    y = graph.tensor("y", (ROWS, COLUMNS), 2.0, TensorKind.ACTIVATION)
    graph.op("product", "matmul", (x, w), (y,), rule_of("i k, k j -> i j", SIZES), flop=flop, precision="bf16")
    z = graph.tensor("z", (ROWS, COLUMNS), 2.0, TensorKind.ACTIVATION)
    graph.op("pass", "any", (y,), (z,), rule_of("i j -> i j", SIZES))
    return graph.done()


def of(graph, name, **prices):
    """The candidates of an operator and what each costs, before anything is visited, on two devices."""
    mesh, (level,) = refine_mesh(mesh_of(2))
    cut = _Cut(_Progress(graph, mesh, Volumes(**prices)), level)
    number = next(at for at, op in enumerate(graph.ops) if op.name == name)
    rule = graph.ops[number].rule
    names = ["" if factor == NONE else rule.factors[factor].name for factor in cut.candidates[number]]
    return dict(zip(names, cut.cost_s[number], strict=True))


def test_a_product_counts_half_of_what_stays_whole():
    """Cutting i leaves the weights whole, cutting j the input, and cutting k the output; to cut none is no choice."""
    assert of(product(), "product") == {
        "i": INNER * COLUMNS * 2 / 2,
        "j": ROWS * INNER * 2 / 2,
        "k": ROWS * COLUMNS * 2 / 2,
    }


def test_by_kind_they_are_all_reduces():
    """On two devices an all-reduce sends what it adds up once."""
    assert of(product(), "product", reading="by_kind") == {
        "i": INNER * COLUMNS * 2,
        "j": ROWS * INNER * 2,
        "k": ROWS * COLUMNS * 2,
    }


def after(graph, chosen, **prices):
    """Return the costs of the last operator's candidates once the product has been cut by a factor."""
    mesh, (level,) = refine_mesh(mesh_of(2))
    cut = _Cut(_Progress(graph, mesh, Volumes(**prices)), level)
    number = next(at for at, op in enumerate(graph.ops) if op.name == "product")
    factor = next(at for at, each in enumerate(graph.ops[number].rule.factors) if each.name == chosen)
    cut.close(lambda op, _level, _ways: (factor,) if op == number else None, 0)
    cut.visit("weight")
    names = ["", "i", "j"]
    return dict(zip(names, cut.cost_s[-1], strict=True))


Y = ROWS * COLUMNS * 2
"""Bytes of the product."""


@pytest.mark.parametrize(
    ("reading", "cut", "expected"),
    [
        ("by_coefficient", "i", {"": Y + 16 * Y, "i": 0.0, "j": 16 * Y}),
        ("by_coefficient", "k", {"": Y, "i": 16 * Y, "j": 16 * Y}),
        ("by_kind", "i", {"": 4 * Y / 2 + Y / 2, "i": 0.0, "j": Y / 4}),
        ("by_kind", "k", {"": 4 * Y / 2, "i": 0.0, "j": 0.0}),
    ],
)
def test_a_mismatch_counts_by_reading(reading, cut, expected):
    """By coefficient 16 times the tensor wherever two ends differ; by kind what the collective sends.

    Added up, the output of a product that is cut by k is whole, and its operator has paid for that.
    """
    assert after(product(), cut, reading=reading) == pytest.approx(expected)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_neither_links_nor_devices_count(order, reading):
    """The plan is the same on slow and on fast hosts, and whatever the arithmetic."""
    plans = []
    for cluster, flop in (("ascend-910b", 1.0), ("dgx-h100", 1.0), ("ascend-910b", 1e18)):
        mesh = DeviceMesh(names=("a",), sizes=(8,), cluster=find_cluster(cluster))
        plan = recursive_plan(product(flop=flop), *refine_mesh(mesh), order=order, prices=Volumes(reading=reading))
        plans.append(plan.served.tolist())

    assert plans[0] == plans[1] == plans[2]
