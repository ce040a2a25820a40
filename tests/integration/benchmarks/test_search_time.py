"""The benchmark of search times: its rows, and when targets are met."""

import pytest

pytest.importorskip("jax", reason="the benchmark plans JAX programs")

from benchmarks.speed import search_time


def test_quick_rows(answered):
    """Small steps have the same rows as full ones, and as many states as asked for were propagated."""
    arguments = ("--quick", "--repeats", 1, "--automap-states", 5, "--tables", "steps", "ended", "axes", "--layers", 1)
    found = answered(search_time, *arguments, "--steps", "gemma_small")
    (row,), (ended,) = found["steps"], found["ended"]

    assert row["automap_states"] >= 5
    assert not row["automap_has_ended"]
    assert row["automap_projected_s"] == pytest.approx(
        (row["automap_propagation_s"] + row["automap_pricing_s"]) * row["states"]
    )
    assert row["automap_ratio"] > row["automap_ratio_propagation"] > 1
    assert ended["automap_states"] > row["automap_states"]
    assert ended["ratio"] == pytest.approx(ended["automap_s"] / ended["search_s"])
    assert [each["axes"] for each in found["axes"]] == [1, 2, 3]
    assert found["targets"] == []


def test_targets_follow_the_rows():
    """A target is met by what was measured, and only what was measured has one."""
    steps = [
        {"step": "gemma_2b", "analysis_s": 0.1, "search_s": 11.0},
        {"step": "unet", "analysis_s": 0.1, "search_s": 3.0, "automap_ratio": 26.0},
    ]
    layers = [{"layers": 9, "search_s": 1.0}, {"layers": 36, "search_s": 5.0}]
    found = search_time.targets({"steps": steps, "layers": layers})

    assert [each["is_met"] for each in found] == [True, False, True, False]
    assert [each["measured"] for each in found] == [0.1, 11.0, 26.0, 5.0]
