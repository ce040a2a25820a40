"""Named dims: what is cut together has one colour, and what that leaves open is a conflict."""

from hypothesis import given

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, GraphBuilder, TensorKind
from tests.support.graphs.attention_graphs import attention
from tests.support.graphs.random_graphs import graphs
from tests.support.graphs.small_graphs import mlp
from tuner.planners.toast.named_dims import WHOLE, named_dims

SIZES = {"m": 8, "n": 8, "k": 4}


def graph_of(*ops, inputs=(), constants=()):
    """A graph of (name, operands, result dims, pattern)."""
    graph = GraphBuilder(name="small")
    tensors = {}
    for primitive, sources in ((INPUT, inputs), (CONSTANT, constants)):
        for name, dims in sources:
            tensors[name] = graph.source(primitive, name, [SIZES[dim] for dim in dims.split()], 2, TensorKind.DATA)
    for name, operands, dims, pattern in ops:
        tensors[name] = graph.tensor(name, [SIZES[dim] for dim in dims.split()], 2, TensorKind.ACTIVATION)
        read = [tensors[operand] for operand in operands]
        graph.op(f"{name}.op", "any", read, [tensors[name]], rule_of(pattern, SIZES))
    return graph.done()


def test_a_perceptron_has_the_colours_of_figure_2():
    """Batch, ffn, and hidden before and after the layer are four colours; a layer has two more."""
    one, three = named_dims(mlp()), named_dims(mlp(num_layers=3))

    assert (one.num_colours, one.conflicts) == (4, ())
    assert (three.num_colours, three.conflicts) == (8, ())


def test_the_conflict_of_a_product_with_itself():
    """A tensor times its transpose has both its dims of one colour: one conflict, of one tensor (section 3.3)."""
    graph = graph_of(
        ("y", ("x",), "k m", "m k -> k m"), ("z", ("x", "y"), "m n", "m k, k n -> m n"), inputs=[("x", "m k")]
    )
    names = named_dims(graph)

    ((one, other),) = names.conflicts
    assert names.ops[one] == names.ops[other] == 2
    assert {graph.ops[2].rule.factors[factor].name for factor in names.factors[[one, other]]} == {"m", "n"}


def test_figure_5_has_five_conflicts():
    """Simplified attention has conflicts at a, its sum, c, d and the last product."""
    names = named_dims(attention())
    graph = names.graph

    assert [graph.ops[names.ops[one]].name for one, _ in names.conflicts] == [f"0.{name}.op" for name in "abcdz"]


def test_a_constant_ties_nothing_together():
    """Two dims that meet in a constant alone keep colours of their own, and the constant follows its first reader."""
    graph = graph_of(
        ("one", ("x", "c"), "m", "m, m -> m"),
        ("other", ("y", "c"), "n", "n, n -> n"),
        inputs=[("x", "m"), ("y", "n")],
        constants=[("c", "m")],
    )
    names = named_dims(graph)
    colours = {graph.ops[op].name: int(colour) for op, colour in zip(names.ops, names.colours, strict=True)}

    assert colours["one.op"] != colours["other.op"]
    assert colours["c"] == colours["one.op"]
    assert names.num_colours == 2


def test_a_dim_that_its_operator_needs_whole_ties_its_readers():
    """Two readers of a tensor whose maker can't be cut have one colour, and the maker's factor has no name."""
    graph = GraphBuilder(name="blocked")
    x = graph.source(INPUT, "x", (8,), 2, TensorKind.DATA)
    y, one, other = (graph.tensor(name, (8,), 2, TensorKind.ACTIVATION) for name in ("y", "one", "other"))
    graph.op("sort", "sort", (x,), (y,), rule_of("m -> m", SIZES, blocked=("m",)))
    graph.op("one", "any", (y,), (one,), rule_of("m -> m", SIZES))
    graph.op("other", "any", (y,), (other,), rule_of("m -> m", SIZES))
    names = named_dims(graph.done())
    colours = names.colours[[names.name_of(2, 0), names.name_of(3, 0)]]

    assert colours[0] == colours[1] != names.colours[names.name_of(0, 0)]
    assert names.name_of(1, 0) is None
    assert (names.factors == WHOLE).sum() == 1


@given(graph=graphs())
def test_entries_of_the_map_have_one_colour(graph):
    """In any graph every entry of M ends in the colour where it began, unless it begins in a constant."""
    names = named_dims(graph)
    ties = [op not in names.constants for op in names.ops[names.sources].tolist()]

    assert (names.colours[names.sources[ties]] == names.colours[names.targets[ties]]).all()
    assert all(names.colours[one] == names.colours[other] for one, other in names.conflicts)
    assert all(graph.ops[op].primitive != STATE for op in names.constants)
