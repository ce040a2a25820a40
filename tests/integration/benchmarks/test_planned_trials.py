"""Plans in real trials beside their predictions: those of small models, and the rows of ManuMatic's tables."""

import pytest

from benchmarks.judges import planned_trials
from benchmarks.judges.planned_trials import agreement, config_of, plans_of
from benchmarks.papers import manumatic_trials
from benchmarks.papers.manumatic_rows import D_REC, PIN
from benchmarks.support import planned_runs
from costmodels.job.parallel_config import HAND
from costmodels.sharding.plan import cost_of, violations


@pytest.fixture
def small_trials(monkeypatch):
    """Gives models one layer, and trials two steps."""
    pytest.importorskip("torch", reason="the benchmark trains: pip install 'meshtune[torch]'")
    monkeypatch.setattr(planned_trials, "LAYERS", 1)
    monkeypatch.setattr(planned_trials, "HIDDEN", 256)
    monkeypatch.setattr(manumatic_trials, "LAYERS", 1)
    steps = {"warmup_steps": 1, "min_steps": 2, "max_steps": 2}
    monkeypatch.setattr(planned_runs, "OPTIONS", {**planned_runs.OPTIONS, **steps})


def a_row(planner, predicted, measured, sign):
    """Return a row of a plan as far as its agreement goes."""
    return {"backend": "torch", "planner": planner, "predicted": predicted, "measured": measured, "sign": sign}


def test_ties_are_no_votes():
    """Signs are counted among plans that trials can tell from the plan by hand, for each planner and for all."""
    rows = [
        a_row("descent", 0.8, 0.9, "agrees"),
        a_row("descent", 0.9, 1.01, "tie"),
        a_row("recursive", 0.9, 1.2, "differs"),
    ]

    found = {row["planner"]: row for row in agreement(rows)}

    assert (found["descent"]["ties"], found["descent"]["share"]) == (1, 1.0)
    assert (found["recursive"]["ties"], found["recursive"]["share"]) == (0, 0.0)
    assert (found["all"]["plans"], found["all"]["agree"], found["all"]["share"]) == (3, 1, 0.5)


@pytest.mark.parametrize("name", ["gpt2", "llama-2-13b", "qwen1.5-moe-a2.7b"])
def test_every_case_has_plans_to_compare(name):
    """Each case has a plan by hand on eight devices, and a planner whose plan is another one and is valid."""
    plans = plans_of(name, ["recursive", "descent"])

    assert config_of(name).num_devices == 8
    assert len(plans) > 1
    assert [violations(plan) for plan in plans.values()] == [()] * len(plans)
    if "descent" in plans:
        assert cost_of(plans["descent"]).step_time_s <= cost_of(plans[HAND]).step_time_s


@pytest.mark.usefixtures("small_trials")
def test_plans_run_beside_each_other(answered):
    """A model trains by hand and by a planner: the losses are the same, and ranks send what the plan says."""
    found = answered(planned_trials, "--models", "gpt2", "--planners", "descent", "--rounds", 1)

    (row,) = found["rows"]
    assert (row["planner"], row["bytes"]) == ("descent", "equal")
    assert row["loss_error"] < 1e-5
    assert row["predicted"] < 1
    assert 0.3 < row["measured"] < 3
    assert [each["planner"] for each in found["agreement"]] == ["descent", "all"]


@pytest.mark.usefixtures("small_trials")
def test_rows_of_the_tables_run(answered):
    """A pinned plan of Table 2 trains beside D-Rec's with the same losses."""
    found = answered(manumatic_trials, "--table", 2, "--row", PIN, "--rounds", 1)

    assert [row["row"] for row in found["rows"]] == [D_REC, PIN]
    assert all(row["loss_error"] < 1e-4 for row in found["rows"])
    assert found["rows"][0]["measured"] == 1.0
