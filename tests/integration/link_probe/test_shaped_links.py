"""The probe between hosts whose adapters are really shaped, with and without traffic beside it."""

import pytest

from benchmarks.endurance import probed_links
from benchmarks.support.shaped_hosts import missing


def test_shaped_adapters_are_named(answered, monkeypatch):
    """A host with a tenth of its bandwidth, and one that receives at a quarter, are named alone and with their shares,
    and are whole again when they are restored; traffic in a fifth of the time is taken for no slow link.
    """
    if lacks := missing():  # only root may make networks; the probes on Ray and on Slurm are tested without
        pytest.skip(f"needs {lacks}")
    monkeypatch.setattr(probed_links, "BUSY", (0.2,))
    monkeypatch.setattr(probed_links, "COUNTED", (probed_links.TRANSFERS,))
    told = answered(probed_links, "--probes", "3")
    named = {one["fault"]: one["named"] for one in told["faults"]}

    assert named == {
        "none": {},
        "h1 at a tenth": {"h1": pytest.approx(0.1, rel=0.2)},
        "h2 receives at a quarter": {"h2": pytest.approx(0.25, rel=0.2)},
    }
    assert [one["restored"] for one in told["faults"]] == [{}, {}, {}]
    assert [one["changes"] for one in told["traffic"]] == [0]
