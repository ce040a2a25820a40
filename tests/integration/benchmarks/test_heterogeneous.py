"""The benchmark of unlike devices: what its figures mean, on its smallest case."""

import numpy as np
import pytest

from benchmarks.papers.heterogeneous import (
    CASES,
    bands,
    fastest,
    setting_of,
    slowed,
    undivided_s,
    unlike,
    v100s,
    works_s,
)
from tuner.space.enumeration import SpaceOptions, enumerate_space


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda case: case.assumption)
def test_no_plan_of_the_same_degrees_passes_the_bound(case):
    """Uneven layers gain, and no more than if nothing waited; bf16 at the fp32 rate makes V100 far slower."""
    row, ratios = unlike(case, "llama-7b", 2)
    of_products = next(ratio["r"] for ratio in ratios if ratio["operators"] == "matmul")

    assert 1.0 <= row["same degrees"] <= row["bound"]
    assert row["r"] > 1.0
    assert (of_products > 8) == case.emulates_bf16


def test_work_that_is_divided_perfectly_takes_half_as_long_on_two_equal_halves():
    """Two kinds of hosts of one speed do what one does in half the time, with nothing waiting."""
    cluster = CASES[0].cluster(2)
    alike = setting_of("llama-7b", cluster, "bf16")
    grid, _ = enumerate_space(alike, SpaceOptions())
    config = fastest(alike, grid, 1).config(0)
    first_s, _ = works_s(alike, config)
    cells = config.num_devices / config.tp

    whole_s = alike.job.global_batch_size / config.mbs * first_s
    assert undivided_s(alike, config, (first_s, first_s)) == pytest.approx(whole_s / cells)


def test_bandwidth_is_scaled_inside_hosts_and_between():
    """A share of a cluster's bandwidth is that of each of its links."""
    full, half = v100s(16, 1.0), slowed(v100s(16, 1.0), 0.5)

    for links in ("intra_links", "nic_links"):
        before, after = (getattr(cluster.groups[0], links)[0].bandwidth_bytes_per_s for cluster in (full, half))
        assert after == before / 2


def test_bands_lie_between_the_bandwidths_that_frame_them():
    """Costs of 60%, 20% and 0% at 1, 4 and 16 times the bandwidth pass 52% and 25% between 1 and 4."""
    rows = [
        {"model": "m", "bandwidth": share, "cost": cost, "anew": 0.1} for share, cost in ((1, 0.6), (4, 0.2), (16, 0.0))
    ]
    (found,) = bands(rows)
    narrow, wide = map(float, found["25% to 52%"].split(" to "))

    assert narrow == pytest.approx(2 ** np.interp(0.08, [0, 0.4], [0, 2]), rel=0.05)
    assert 1 < narrow < wide < 4
    (steep,) = bands([row | {"cost": row["cost"] + 1} for row in rows])
    assert steep["2% to 8%"] == "not reached"
