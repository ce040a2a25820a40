"""The planners' benchmark: a row for each graph and mesh, in which no plan is below the bound."""

import pytest

from benchmarks.judges import planner
from tuner.planners.sharding.recursive import ORDERS


@pytest.mark.parametrize("parts", [(), ("--parts",)])
def test_no_plan_is_below_the_bound(answered, parts):
    """On every mesh HiGHS proves the optimum, no plan is below it, and descent makes none worse."""
    meshes = ("model=2", "data=2,model=2")
    figures = answered(planner, "--models", "llama-7b", "--layers", 1, "--meshes", *meshes, *parts)

    assert [row["mesh"] for row in figures["rows"]] == list(meshes)
    for row in figures["rows"]:
        assert row["HiGHS"] == "optimal"
        for order in ORDERS:
            assert row[order] >= row[f"{order}+descent"] >= 1.0 - 1e-6
        assert row["over_bound"] == pytest.approx(min(row[f"{order}+descent"] for order in ORDERS))


def test_figures_stand_together(answered):
    """Each planner has its median and its worst figure over all graphs."""
    figures = answered(planner, "--models", "llama-7b", "gpt-13b", "--layers", 1, "--meshes", "model=2")

    together = {row["planner"]: row for row in figures["together"]}
    assert len(together) == 2 * len(ORDERS) + 1
    assert together["all orders"]["graphs"] == 2
    assert together["all orders"]["median"] <= together["all orders"]["worst"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--models", "lama"), ("--meshes", "data"), ("--meshes", "data=2,data=2"), ("--meshes", "a=x")],
)
def test_what_is_not_there_is_a_mistake_of_the_user(capsys, option, value):
    """A model that the catalog lacks, or a mesh that says nothing, ends the benchmark with a sentence."""
    assert planner.main([option, value, *(("--meshes", "model=2") if option == "--models" else ())]) == 2
    assert value in capsys.readouterr().err
