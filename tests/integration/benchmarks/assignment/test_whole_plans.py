"""Strategy assignment beside the planners, on a layer of a model."""

from benchmarks.assignment import whole_plans
from tests.support.benchmark_runs import json_of


def test_no_planner_beats_the_optimum():
    """Every planner has a plan of the layer, and none beats HiGHS; a descent improves the plan of assignment."""
    options = ("--models", "llama3-8b", "--meshes", "data=2,model=4", "--time-limit", 2)
    rows = json_of(whole_plans.__name__, *options, "--json")["rows"]
    step_ms = {row["planner"]: row["step_ms"] for row in rows}

    assert None not in step_ms.values()
    assert all(each >= step_ms["HiGHS"] * (1 - 1e-6) for each in step_ms.values())
    assert step_ms["assignment, descent"] <= step_ms["assignment"] <= step_ms["by hand"]
