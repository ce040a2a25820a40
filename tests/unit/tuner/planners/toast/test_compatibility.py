"""Compatibility: conflicts between which nothing shall move are resolved alike, in repeated layers as well."""

import pytest

from costmodels.blocks.operator import OpKind
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import cost_of
from tests.support.graphs.attention_graphs import attention
from tests.support.graphs.random_graphs import mesh_of
from tests.support.graphs.small_graphs import mlp
from tuner.planners.toast.colour_actions import Action, ColourActions
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims

SIZES = {"m": 8, "n": 8, "k": 4}


def of(graph):
    """What of a graph is decided together."""
    return compatibility(named_dims(graph))


def collectives_of(actions, action):
    """What a plan of one action sends: kinds, and the tensors that it moves."""
    plan = actions.plan(actions.after(actions.first, action))
    return sorted((each.move.kind, plan.graph.tensors[each.tensor].name) for each in cost_of(plan).collectives)


def test_figure_5_has_one_set_and_two_resolutions():
    """All five conflicts are one set; one resolution is figure 5b, the other gathers two tensors and sums one up."""
    found = of(attention())
    actions = ColourActions(found, mesh_of(4))
    sequence = int(found.colour_groups[found.sets[0].colour])
    both = [collectives_of(actions, Action(group=sequence, resolution=bit, axis=0)) for bit in (0, 1)]

    assert [len(each.sides) for each in found.sets] == [5]
    assert all(box.is_compatible for box in found.boxes)
    assert found.num_resolutions == 2
    of_5b = [(OpKind.ALL_GATHER, "0.k"), (OpKind.REDUCE_SCATTER, "0.z")]
    assert both.count(of_5b) == 1
    (other,) = (sent for sent in both if sent != of_5b)
    assert other == [(OpKind.ALL_GATHER, "0.qt"), (OpKind.ALL_GATHER, "0.v"), (OpKind.ALL_REDUCE, "0.b")]


@pytest.mark.parametrize(("num_layers", "masks"), [(1, "own"), (4, "none"), (4, "shared"), (4, "own")])
def test_repeated_layers_share_a_resolution(num_layers, masks):
    """However many layers there are, and whoever has the mask, a layer has a set and all share one choice."""
    found = of(attention(num_layers, masks=masks))

    assert len(found.sets) == num_layers
    assert found.num_resolutions == 2


def test_sets_of_repeated_layers_are_turned_alike():
    """The same resolution serves the same factor in every layer."""
    found = of(attention(3))
    actions = ColourActions(found, mesh_of(4))
    sequence = int(found.colour_groups[found.sets[0].colour])
    for bit in (0, 1):
        plan = actions.plan(actions.after(actions.first, Action(group=sequence, resolution=bit, axis=0)))
        served = {
            (op.name.partition(".")[2], int(plan.served[number, 0]))
            for number, op in enumerate(plan.graph.ops)
            if op.name.endswith((".a.op", ".b.op", ".c.op", ".d.op", ".z.op"))
        }
        assert len(served) == 5


def test_a_path_across_a_box_sets_its_conflicts_apart():
    """Where the sums of a tensor's rows are added to its columns, both sums may be cut otherwise than the tensor."""
    graph = GraphBuilder(name="crossed")
    x = graph.source(INPUT, "x", (8, 4), 2, TensorKind.DATA)
    y, wide, total = (graph.tensor(name, (8, 8), 2, TensorKind.ACTIVATION) for name in ("y", "wide", "total"))
    sums = graph.tensor("sums", (8,), 2, TensorKind.ACTIVATION)
    graph.op("product", "product", (x, x), (y,), rule_of("m k, n k -> m n", SIZES))
    graph.op("reduce", "reduce", (y,), (sums,), rule_of("m n -> m", SIZES))
    graph.op("broadcast", "broadcast", (sums,), (wide,), rule_of("n -> m n", SIZES))
    graph.op("add", "add", (y, wide), (total,), rule_of("m n, m n -> m n", SIZES))
    found = of(graph.done())
    ops, names = found.names.graph.ops, found.names

    def names_of(pair):
        return ops[names.ops[pair[0]]].name

    assert {(names_of(box.written), names_of(box.read)): box.is_compatible for box in found.boxes} == {
        ("product", "reduce"): True,
        ("broadcast", "add"): True,
        ("product", "add"): False,
    }
    together = {frozenset(map(names_of, each.sides)) for each in found.sets}
    assert together == {frozenset({"product", "reduce"}), frozenset({"broadcast", "add"})}


def test_parameters_of_repeated_layers_have_one_group():
    """The ffn of all layers of a perceptron is cut at once, and so is what lies between them."""
    found = of(mlp(num_layers=4))
    graph, names = found.names.graph, found.names
    groups: dict[str, set[int]] = {}
    for name, op, factor in zip(range(len(names.ops)), names.ops, names.factors, strict=True):
        group = int(found.colour_groups[names.colours[name]])
        groups.setdefault(graph.ops[op].rule.factors[factor].name, set()).add(group)

    assert names.num_colours == 10
    assert (len(groups["batch"]), len(groups["ffn"])) == (1, 1)
    assert len(groups["hidden"]) < 5


def test_colours_that_meet_are_not_cut_together():
    """In a chain of equal products neighbours are of two groups, and every second one is of the same."""
    graph = GraphBuilder(name="chain")
    x = graph.source(INPUT, "x", (4, 8), 2, TensorKind.DATA)
    weights = []
    for layer in range(6):
        weights.append(graph.source("state", f"{layer}.w", (8, 8), 2, TensorKind.PARAMETER))
        made = graph.tensor(f"{layer}.y", (4, 8), 2, TensorKind.ACTIVATION)
        graph.op(f"{layer}.product", "product", (x, weights[-1]), (made,), rule_of("k m, m n -> k n", SIZES))
        x = made
    found = of(graph.done())
    names = found.names
    rows, columns = (
        [
            int(found.colour_groups[names.colours[names.name_of(names.graph.maker[weight][0], dim)]])
            for weight in weights
        ]
        for dim in (0, 1)
    )

    assert all(row != column for row, column in zip(rows, columns, strict=True))
    assert rows[1:] == columns[:-1]
    assert len(set(rows[1:])) == 2
