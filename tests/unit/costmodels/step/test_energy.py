from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.energy import busy_share, mean_power_w
from costmodels.step.step_time import StepEstimate
from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.power import cluster_power_w, idle_power_w
from tests.support.settings.random_settings import grid_of

ONE = grid_of(ParallelConfig(tp=8))


def step_of(**parts):
    """One step of these parts [s]."""
    breakdown = {part: np.array([parts.get(part, 0.0)]) for part in BREAKDOWN}
    return StepEstimate(step_time_s=sum(breakdown.values()), breakdown_s=breakdown)


def test_a_step_costs_power_times_time_by_hand():
    """Eight H100 that compute for 3 s and wait for 1 s: 3 s at 8.4 kW and 1 s at 5.6 kW."""
    estimate = step_of(compute=2.5, optimizer=0.5, bubble=0.6, tp=0.4)

    assert busy_share(estimate) == pytest.approx([0.75])
    assert mean_power_w(find_cluster("dgx-h100"), ONE, estimate) * 4 == pytest.approx([3 * 8400 + 1 * 5600])


@given(parts=st.dictionaries(st.sampled_from(BREAKDOWN), st.floats(0.01, 10), min_size=1))
def test_power_lies_between_waiting_and_computing(parts):
    """Whatever a step consists of, its mean power is that of neither more nor less than the whole host at work."""
    cluster = find_cluster("dgx-h100")

    (power_w,) = mean_power_w(cluster, ONE, step_of(**parts))

    assert cluster_power_w(cluster, 0.0) - 1e-6 <= power_w <= cluster_power_w(cluster, 1.0) + 1e-6


def test_a_shorter_bubble_saves_less_energy_than_time():
    """Of two steps that compute as long, the one that waits less takes less energy, but by a smaller share."""
    long, short = step_of(compute=3, bubble=1), step_of(compute=3, bubble=0.5)
    cluster = find_cluster("dgx-h100")
    energies = [mean_power_w(cluster, ONE, each)[0] * each.step_time_s[0] for each in (long, short)]

    assert 3.5 / 4 < energies[1] / energies[0] < 1


def test_idle_hosts_count_while_they_stay_powered_on():
    """A layout on one of two hosts draws what that host does, and the idle power of the other unless that is off."""
    two = cluster_from_mapping({"name": "dgx-h100", "hosts": 2}, Path())
    grid = grid_of(ParallelConfig(tp=8, assignment=Assignment(hosts=(0,))))
    one, estimate = find_cluster("dgx-h100"), step_of(compute=1)

    kept, given_back = (mean_power_w(two, grid, estimate, counts_idle=counts)[0] for counts in (True, False))

    assert given_back == pytest.approx(cluster_power_w(one, 1.0))
    assert kept - given_back == pytest.approx(idle_power_w(one))


def test_no_limit_no_power():
    """Where the catalog has no power limit, the power is unknown rather than zero."""
    assert mean_power_w(find_cluster("trn2"), ONE, step_of(compute=1)) is None
