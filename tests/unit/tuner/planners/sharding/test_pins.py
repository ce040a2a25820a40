"""Pins on small graphs: what they mean, that they hold, and what is said of those that can't."""

from dataclasses import replace

import pytest

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule, rule_of
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.graphs.random_graphs import mesh_of
from tests.support.graphs.small_graphs import mlp
from tuner.planners.sharding.manumatic import PinnedSearch
from tuner.planners.sharding.pins import Pin, resolve_pins
from tuner.planners.sharding.recursive import ORDERS, recursive_plan, refine_mesh, whole
from tuner.planners.sharding.sharding_terms import ShardingTerms

GRAPH = mlp(batch=4096, hidden=1024, ffn=4096, num_layers=2)
MESH = DeviceMesh(names=("data", "model"), sizes=(4, 2), cluster=find_cluster("dgx-a100"))
REFINED, LEVELS = refine_mesh(MESH)
RIVALS = [Pin(op="0.up", dim="ffn", axis="model"), Pin(op="*.up", dim="batch", axis="model")]


def search_of(graph, mesh=MESH, refined_mesh=REFINED, levels=LEVELS, **options):
    """Return the search for plans of a graph under pins."""
    return PinnedSearch(graph=graph, mesh=mesh, refined_mesh=refined_mesh, levels=levels, **options)


def planned(*pins, **options):
    """Plan the small graph under some pins."""
    return search_of(GRAPH, **options).plan(pins)


@pytest.mark.parametrize(
    ("pin", "num_ops"),
    [
        (Pin(op="*.up", dim="ffn", axis="model"), 2),
        (Pin(op="0.down", dim="hidden", axis="data"), 1),
        (Pin(op="*.up.weight", dim="batch", ways=8), 2),
        (Pin(op="*.activation*", dim="ffn", ways=2), 4),
    ],
)
def test_hard_pins_hold(pin, num_ops):
    """What is pinned is cut into a multiple of the pin's ways in every order of visits, whatever that costs."""
    for order in ORDERS:
        found = planned(pin, order=order)

        (report,) = found.reports
        assert (report.is_held, report.missing, report.num_ops) == (True, 0, num_ops)
        assert violations(found.plan) == ()


@pytest.mark.parametrize(
    ("place", "name"),
    [("batch", "batch"), ("operand.0", "batch"), ("operand1.0", "hidden"), ("operand1.1", "ffn"), ("result.1", "ffn")],
)
def test_a_pin_is_found_by_a_name_or_a_place(place, name):
    """A dim of a tensor stands for the first factor that it carries, by its name, or its place where it has none."""
    (factors,) = resolve_pins([Pin(op="0.up", dim=place, ways=2)], GRAPH, MESH, LEVELS).factors

    ((op, factor),) = factors.items()
    assert GRAPH.ops[op].rule.factors[factor].name == name


def test_places_of_a_dim_that_several_factors_share():
    """A dim stands for its slowest factor of more than one iteration, which is the one that an axis can cut."""
    graph, sizes = GraphBuilder(name="joined"), {"one": 1, "heads": 8, "size": 16}
    x = graph.source(INPUT, "x", (128,), 2, TensorKind.DATA)
    made = graph.tensor("made", (8, 16), 2, TensorKind.ACTIVATION)
    rule = rule_of("(one heads size) -> heads size", sizes)
    unnamed = Rule(
        factors=tuple(replace(factor, name="") for factor in rule.factors), operands=rule.operands, results=rule.results
    )
    graph.op("split", "reshape", (x,), (made,), unnamed)
    joined = graph.done()
    (factors,) = resolve_pins([Pin(op="split", dim="operand.0", ways=8)], joined, MESH, LEVELS).factors

    assert [rule.factors[factor].name for factor in factors.values()] == ["heads"]
    with pytest.raises(ConfigError, match=r"'result\.1': can't be cut: split needs it whole") as error:
        resolve_pins([Pin(op="split", dim="result.1", ways=8)], joined, MESH, LEVELS)
    assert error.value.nearest == "valid: result.0, operand.0"


def test_levels_are_dealt_out_so_that_all_pins_hold():
    """A pin of no axis leaves the first level to another that can be served by that alone."""
    mesh = mesh_of(2, 4)
    own_mesh, levels = whole(mesh)
    small = mlp(batch=8, hidden=2, ffn=8)
    pins = [Pin(op="0.up", dim="ffn", ways=2), Pin(op="0.up", dim="hidden", ways=2)]

    found = search_of(small, mesh, own_mesh, levels).plan(pins, counterfactuals=False)

    assert all(report.is_held for report in found.reports)


@pytest.mark.parametrize(("weight_s", "descends"), [(None, False), (1e3, False), (1e3, True)])
def test_levels_before_a_pins_axis_leave_it_room(weight_s, descends):
    """No earlier level cuts what a hard pin, or a soft one of great weight, on a later axis could then not cut."""
    small = mlp(batch=8, hidden=2, ffn=8)
    pins = [
        Pin(op=f"0.{name}", dim="hidden", axis="model", weight_s=weight_s)
        for name in ("up", "down", "up.data", "down.weight")
    ]
    terms = ShardingTerms(small, REFINED) if descends else None

    found = search_of(small, descent=terms).plan(pins, counterfactuals=False)

    assert all(report.is_held for report in found.reports)


def test_a_growing_weight_ends_where_the_hard_pin_is():
    """A soft pin is ignored at no weight, and holds at a large one; what is missing never grows with the weight."""
    hard = Pin(op="*.up", dim="hidden", ways=8)
    missing = [
        planned(Pin(op=hard.op, dim=hard.dim, ways=8, weight_s=weight_s)).reports[0].missing
        for weight_s in (0.0, 1e-4, 1e-2, 1.0)
    ]

    assert missing[0] > 0
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0


def test_what_a_pin_saved_is_told_by_a_plan_without_it():
    """A pin against the planner's own choice costs what the two plans differ by."""
    pin = Pin(op="*.up", dim="hidden", ways=8)
    found = planned(pin)

    without = cost_of(recursive_plan(GRAPH, REFINED, LEVELS)).step_time_s
    assert found.reports[0].saved_s == pytest.approx(without - found.cost.step_time_s)
    assert found.reports[0].saved_s < 0


def test_perturbed_pins_have_other_ways_and_dims():
    """Each pin is tried with half and twice its ways and with the other dims of its operators."""
    found = search_of(GRAPH).perturb([Pin(op="0.up", dim="ffn", ways=4)])

    assert {(each.pin.dim, each.pin.ways) for each in found} == {("ffn", 2), ("ffn", 8), ("batch", 4), ("hidden", 4)}
    assert all(each.number == 0 and each.step_time_s > 0 for each in found)


def test_whole_axes_serve_pins_too():
    """A pin of two ways is over-provisioned where the only axis that is left has four."""
    mesh = mesh_of(8)
    found = search_of(GRAPH, mesh, *whole(mesh)).plan([Pin(op="0.up", dim="ffn", ways=2)])

    assert found.reports[0].num_over_provisioned == 1


@pytest.mark.parametrize(
    ("pins", "key", "told"),
    [
        ([Pin(op="*.upp", dim="ffn", ways=2)], "pins[0].op", "the nearest are *.up"),
        ([Pin(op="0.up", dim="ffm", ways=2)], "pins[0].dim", "did you mean 'ffn'"),
        ([Pin(op="0.up", dim="ffn")], "pins[0]", "ways: 2"),
        ([Pin(op="0.up", dim="ffn", axis="tensor")], "pins[0].axis", "valid: data, model"),
        ([Pin(op="0.up", dim="ffn", ways=3)], "pins[0].ways", "valid: 1, 2, 4, 8"),
        ([Pin(op="0.up", dim="ffn", axis="model", ways=4)], "pins[0].ways", "valid: 1, 2"),
        (
            RIVALS,
            "pins[1]",
            "batch of 0.up into 2 parts; pins[0] (0.up ffn on model) has taken them; fewer ways, another",
        ),
        ([Pin(op="0.up", dim="ffn", ways=8), Pin(op="*.up", dim="batch", ways=2)], "pins[1]", "fewer ways"),
    ],
)
def test_what_can_not_be_pinned_is_told(pins, key, told):
    """A pin that can't be meant, or can't hold beside another, is one message with the way out."""
    with pytest.raises(ConfigError) as error:
        resolve_pins(pins, GRAPH, MESH, LEVELS)

    assert error.value.key == key
    assert told in str(error.value)


def test_what_does_not_divide_is_told():
    """A size that the pin's ways do not divide can't be pinned hard, nor one that only larger whole axes could cut."""
    odd, alone = mlp(batch=4096, hidden=1026, ffn=4096), mesh_of(4)

    with pytest.raises(ConfigError, match=r"hidden of 0\.up, which is 1026, into 4 parts"):
        resolve_pins([Pin(op="0.up", dim="hidden", ways=4)], odd, MESH, LEVELS)
    with pytest.raises(ConfigError, match=r"no level can cut hidden of 0\.up, which is 1026, into a multiple of 2"):
        resolve_pins([Pin(op="0.up", dim="hidden", ways=2)], odd, alone, whole(alone)[1])


@pytest.mark.parametrize(("ways", "taken"), [(3, 4), (5, 4), (6, 8), (7, 8), (100, 8), (1, 1), (4, 4)])
def test_ways_of_a_wish_that_do_not_divide_are_taken_as_the_nearest(ways, taken):
    """A soft pin takes the nearest number of parts that divides the eight devices, and the plan then holds it."""
    (report,) = planned(Pin(op="*.up", dim="ffn", ways=ways, weight_s=1.0)).reports

    assert (report.ways, report.is_held, report.missing) == (taken, True, 0)


def test_ways_of_a_wish_along_an_axis():
    """Along one axis its own devices count; a hard pin of the same ways is refused, with the way out."""
    wish = Pin(op="*.up", dim="ffn", axis="data", ways=3, weight_s=1.0)

    assert resolve_pins([wish], GRAPH, MESH, LEVELS).ways == (4,)
    with pytest.raises(ConfigError, match="does not divide the 4 devices along data; valid: 1, 2, 4, or weight_s"):
        resolve_pins([replace(wish, weight_s=None)], GRAPH, MESH, LEVELS)


def test_ways_of_a_wish_that_do_not_divide_the_dim():
    """A dim of 1,026 has two parts in common with eight devices; one of 1,023 has none, and the wish is missed."""
    wish = Pin(op="0.up", dim="hidden", ways=8, weight_s=1.0)
    graphs = [mlp(batch=4096, hidden=hidden, ffn=4096) for hidden in (1026, 1023)]
    two, none = (search_of(graph).plan([wish]).reports[0] for graph in graphs)

    assert (two.ways, two.is_held) == (2, True)
    assert (none.ways, none.num_held) == (8, 0)
