"""The contest of planners: where the descent is beaten, and that the default of Python callers follows it."""

import pytest

from benchmarks.judges import contest
from hardware.io.errors import ConfigError

pytest.importorskip("jax")


def test_an_assignment_leads_where_no_change_of_one_axis_does(answered):
    """On both axes of 64 devices, and the default then has a plan at least as fast as that."""
    figures = answered(
        contest, "--programs", "gemma_medium", "--meshes", "data=8,model=8", "--planners", "assignment", "default"
    )
    rows = {row["planner"]: row for row in figures["rows"]}
    beats = {row["planner"]: row for row in figures["beats"]}
    together = {row["planner"]: row for row in figures["together"]}

    assert set(beats) == {"assignment", "default"}
    assert beats["default"]["gain_percent"] > 2
    assert beats["default"]["gain_percent"] == pytest.approx(
        100 * (1 - rows["default"]["step_ms"] / rows["descent"]["step_ms"])
    )
    assert together["default"]["beats"] == together["default"]["programs"] == 1
    assert together["descent"]["beats"] == 0


def test_layers_of_the_catalog_have_the_descents_plan(answered):
    """No planner has a faster one, though all pay for their search."""
    figures = answered(contest, "--kinds", "catalog", "--programs", "llama-7b", "--meshes", "data=2,model=4", "model=2")

    assert figures["beats"] == []
    assert {row["planner"] for row in figures["rows"]} == set(contest.PLANNERS)
    assert all(row["seconds"] > 0 for row in figures["rows"])


def test_a_wrong_program_is_named():
    """With the nearest one."""
    with pytest.raises(ConfigError, match="llama-7b"):
        contest.measure(contest.parser().parse_args(["--kinds", "catalog", "--programs", "lama-7b"]))
