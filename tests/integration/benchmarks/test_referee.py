"""The referee: XLA and Shardy send what plans say, and sharded steps compute what the plain ones do.

One process a test, for the number of devices is fixed when JAX starts.
"""

import pytest

pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")

from tests.support.benchmark_runs import json_of

SMALL = ("gemma_small_scan", "moe_small", "graph_network_small", "unet_small", "decode_small")
D_REC = ("--planner", "recursive")
"""D-Rec's plans, for the best ones send nothing of so small a step."""


def rows(*arguments):
    """Run the referee in a process of its own, which sets the number of devices, and return its rows."""
    return json_of("benchmarks.judges.referee", "--json", *D_REC, *arguments)["rows"]


def assert_sent(row, judge):
    """Check that a judge's bytes of each kind are the plan's to 0.1%, and 64 bytes for a scalar or two."""
    for kind, planned in row["bytes"]["plan"].items():
        assert row["bytes"][judge][kind] == pytest.approx(planned, rel=1e-3, abs=64), (row["model"], kind)


def test_small_programs_send_and_compute_what_their_plans_say():
    """Plans of small programs on three axes send the bytes that both judges count, and compute numbers right to 1e-5.

    At least the Adam update is cut; a decoding step has none.
    """
    found = rows("--mesh", "a=2,b=2,c=2", "--model", *SMALL)

    assert [row["model"] for row in found] == list(SMALL)
    for row in found:
        for judge in ("shardy", "xla"):
            assert_sent(row, judge)
        assert sum(row["bytes"]["plan"].values()) > 0 or row["model"] == "decode_small"
        assert row["flop"]["xla"] == pytest.approx(row["flop"]["plan"], rel=1e-6)
        assert row["difference"] < 1e-5


def test_shardy_sends_what_plans_say():
    """At medium size, where products are cut, Shardy sends the bytes of the plan."""
    models = ("graph_network_medium", "unet_medium", "decode_medium")

    for row in rows("--judge", "shardy", "--mesh", "data=2,model=4", "--model", *models):
        assert_sent(row, "shardy")
        assert row["bytes"]["plan"]["gathered"] > 1e5
        assert "xla" not in row["bytes"]


def test_both_agree_on_loops_and_reordered_parts():
    """Both judges send what the plan says of a loop's layers and of experts whose parts are reordered, along the same
    axes.
    """
    found = rows("--no-numbers", "--mesh", "data=2,model=4", "--model", "gemma_medium_scan", "moe_medium")

    for row in found:
        for judge in ("shardy", "xla"):
            assert_sent(row, judge)
        assert row["bytes"]["plan"]["gathered"] > 1e5
        assert row["flop"]["xla"] == pytest.approx(row["flop"]["plan"], rel=1e-6)
        assert row["bytes_by_axes"]["xla"] == pytest.approx(row["bytes_by_axes"]["shardy"], rel=1e-3, abs=64)
    assert found[1]["reordered"]["places"] > 0
    assert found[1]["reordered"]["bytes"] > 0
