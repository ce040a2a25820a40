"""The referee: XLA and Shardy send what plans say, and sharded steps compute what the plain ones do.

One process a test, for the number of devices is fixed when JAX starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("gemma_small", "gemma_small_scan", "moe_small", "graph_network_small", "unet_small", "decode_small")
MEDIUM = tuple(name.replace("small", "medium") for name in SMALL)


def referee(*arguments):
    """What it prints and its exit status, in a process that says nothing of devices itself."""
    command = [sys.executable, "-m", "benchmarks.referee", "--json", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def rows(*arguments):
    """The rows that it prints."""
    done = referee(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)["rows"]


def assert_sent(row, judge):
    """A judge's bytes of each kind are the plan's to 0.1%, and 64 bytes for a scalar or two."""
    for kind, planned in row["bytes"]["plan"].items():
        assert row["bytes"][judge][kind] == pytest.approx(planned, rel=1e-3, abs=64), (row["model"], kind)


def test_small_programs_send_and_compute_what_their_plans_say():
    """Of every small program, D-Rec's plan on three axes: bytes by both judges, products, and numbers to 1e-5.

    D-Rec's plan, for the best one sends nothing of so small a step. The Adam update of any is cut.
    """
    found = rows("--planner", "recursive", "--mesh", "a=2,b=2,c=2", "--model", *SMALL)

    assert [row["model"] for row in found] == list(SMALL)
    for row in found:
        for judge in ("shardy", "xla"):
            assert_sent(row, judge)
        assert sum(row["bytes"]["plan"].values()) > 0 or row["model"] == "decode_small"
        assert row["flop"]["xla"] == pytest.approx(row["flop"]["plan"], rel=1e-6)
        assert row["difference"] < 1e-5


def test_shardy_sends_what_plans_say():
    """Of every program at medium size, where products are cut and parts reordered, with loops and experts."""
    found = rows("--judge", "shardy", "--planner", "recursive", "--mesh", "data=2,model=4", "--model", *MEDIUM)

    for row in found:
        assert_sent(row, "shardy")
        assert row["bytes"]["plan"]["gathered"] > 1e5
        assert "xla" not in row["bytes"]
    assert sum(row["reordered"]["bytes"] for row in found) > 0


def test_xla_agrees_on_loops_and_reordered_parts():
    """XLA sends what the plan says of a loop's layers and of experts whose parts are reordered, along the same axes."""
    found = rows(
        *("--judge", "both", "--no-numbers", "--planner", "recursive", "--mesh", "data=2,model=4"),
        *("--model", "gemma_medium_scan", "moe_medium"),
    )

    for row in found:
        assert_sent(row, "xla")
        assert row["flop"]["xla"] == pytest.approx(row["flop"]["plan"], rel=1e-6)
        assert row["bytes_by_axes"]["xla"] == pytest.approx(row["bytes_by_axes"]["shardy"], rel=1e-3, abs=64)
    assert found[1]["reordered"]["places"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "gemma_smal"), "must be a program of the zoo; did you mean 'gemma_small'"),
        (("--planner", "descend"), "must be a planner; did you mean 'descent'"),
        (("--mesh", "data=3"), "do not divide the 8"),
    ],
)
def test_mistakes_are_told(arguments, told):
    """What there is none of is one message, and exit status 2."""
    done = referee(*arguments)

    assert done.returncode == 2
    assert told in done.stderr
