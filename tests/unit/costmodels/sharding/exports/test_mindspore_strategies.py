"""MindSpore's strategies keep to the form of its documentation; MindSpore itself runs nowhere here."""

from dataclasses import replace

import pytest
from hypothesis import given

from costmodels.sharding.exports.mindspore_strategies import mindspore_strategies, shape_errors
from tests.support.graphs.named_plans import mesh_of, plan_by_names
from tests.support.graphs.random_graphs import plans
from tests.support.graphs.shared_factors import served_together
from tests.support.graphs.small_graphs import mlp

GRAPH = mlp(batch=64, hidden=32, ffn=128)


def data_and_tensor():
    """The batch along one axis and ffn along the other."""
    mesh = mesh_of(data=2, model=4)
    return plan_by_names(GRAPH, mesh, data=[("*", ("batch",))], model=[("*", ("ffn",))])


@pytest.mark.slow
@given(plan=plans())
def test_any_plan_keeps_to_the_form(plan):
    """Ways divide dims and devices, layouts say the same as strategies, and no axis cuts a tensor twice."""
    strategies = mindspore_strategies(plan)

    assert shape_errors(strategies) == ()
    operators = [op for op in plan.graph.ops if not op.is_source]
    assert [each.op for each in strategies.operators] == [op.name for op in operators]
    assert [len(each.inputs) for each in strategies.operators] == [len(op.operands) for op in operators]


def test_a_product_is_cut_as_the_plan_says():
    """Rows by the data axis, columns by the model axis; the second product's sums lie whole along the latter."""
    told = {each["op"]: each for each in mindspore_strategies(data_and_tensor()).to_json()["operators"]}

    assert [each["strategy"] for each in told["0.up"]["in"]] == [[2, 1], [1, 4]]
    assert told["0.up"]["out"] == [{"strategy": [2, 4], "layout": ["data", "model"]}]
    assert [each["strategy"] for each in told["0.down"]["in"]] == [[2, 4], [4, 1]]
    assert told["0.down"]["out"] == [{"strategy": [2, 1], "layout": ["data", "None"]}]


def test_two_axes_on_a_dim_are_a_tuple():
    """A dim that both axes cut names both, the major one first; a part of an axis has no point in its alias."""
    mesh = replace(mesh_of(data=2, model=4), names=("data.0", "model"))
    plan = served_together(GRAPH, mesh, **{"data.0": [("*", ("batch",))], "model": [("*", ("batch",))]})
    strategies = mindspore_strategies(plan)

    assert strategies.alias_name == ("data_0", "model")
    assert strategies.to_json()["arguments"]["x"] == {"strategy": [8, 1], "layout": [["data_0", "model"], "None"]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"strategy": (4, 1)}, "is not the strategy"),
        ({"shape": (7, 32)}, "can't be cut by"),
        ({"strategy": (2, 2), "layout": ("data", "data")}, "cuts two dims"),
        ({"shape": (64, 32, 1), "strategy": (2, 1)}, "is not the strategy"),
    ],
)
def test_a_wrong_form_is_told(changes, told):
    """The check finds a layout that is no strategy, ways that don't divide, and an axis that is used twice."""
    strategies = mindspore_strategies(data_and_tensor())
    wrong = replace(strategies, arguments={"x": replace(strategies.arguments["x"], **changes)})

    (error,) = shape_errors(wrong)
    assert error.startswith("x: ")
    assert told in error
