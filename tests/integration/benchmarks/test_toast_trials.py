"""Trials of the plans of TOAST's comparison."""

import pytest

pytest.importorskip("jax", reason="the benchmark runs JAX programs: pip install 'meshtune[jax]'")

from benchmarks.papers.toast_trials import MODELS, plans_of
from costmodels.sharding.plan import violations
from tests.support.benchmark_runs import json_of


@pytest.mark.parametrize("name", MODELS)
def test_models_have_a_manual_plan_to_compare_with(name):
    """Each model has a valid plan by hand and one by D-Rec on eight devices."""
    plans = plans_of(name, ["d_rec"])

    assert next(iter(plans)) == "manual"
    assert [violations(plan) for plan in plans.values()] == [()] * len(plans)
    assert {plan.mesh.num_devices for plan in plans.values()} == {8}


def test_plans_run_beside_the_manual_one():
    """D-Rec's plan of a decoding step runs on eight devices, and its ratio to the manual plan is told."""
    found = json_of(
        "benchmarks.papers.toast_trials", *("--models", "decoding", "--planners", "d_rec", "--rounds", 1, "--json")
    )

    (row,) = found["rows"]
    assert (row["model"], row["planner"]) == ("decoding", "d_rec")
    assert row["manual_s"] > 0
    assert row["predicted"] == pytest.approx(1, abs=0.1)
    assert 0.2 < row["measured"] < 5
