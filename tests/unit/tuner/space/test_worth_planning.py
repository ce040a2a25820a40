"""Configurations whose uneven work is planned, of very many."""

from pathlib import Path

import numpy as np
import pytest

from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import job_of, setting_for
from tuner.space.enumeration import SpaceOptions, enumerate_space
from tuner.space.worth_planning import balanced_s, worth_planning

MIXED = cluster_from_mapping({"groups": [{"name": "dgx-h100"}, {"name": "l20"}]}, Path())


def test_few_configurations_are_all_planned():
    """A grid of no more than the most is planned whole."""
    setting = setting_for(job_of(batch=64), MIXED)
    grid, _ = enumerate_space(setting, SpaceOptions())

    assert worth_planning(setting, grid, len(grid), memory_headroom=0.08).tolist() == list(range(len(grid)))


def test_both_orders_choose():
    """The fastest with even work are chosen, and on unlike hosts the fastest with balanced stages beside them."""
    for cluster in (MIXED, find_cluster("dgx-h100", hosts=2)):
        setting = setting_for(job_of(batch=64), cluster)
        grid, _ = enumerate_space(setting, SpaceOptions())
        even_s, balanced = estimate_step(setting, grid).step_time_s, balanced_s(setting, grid)

        chosen = worth_planning(setting, grid, 20, memory_headroom=0.08)
        assert len(set(chosen.tolist())) == len(chosen) <= (30 if cluster is MIXED else 20)
        # on unlike hosts what does not fit may fit when it is uneven
        counts = cluster is MIXED or estimate_memory(setting, grid).fits(0.08)
        assert set(np.argsort(np.where(counts, even_s, np.inf))[:20].tolist()) <= set(chosen.tolist())
        if cluster is MIXED:
            fits = estimate_memory(setting, grid).needed_bytes <= find_cluster("dgx-h100").memory_bytes
            of_stages = np.argsort(np.where((grid.pp > 1) & fits, balanced, np.inf))
            assert set(of_stages[:10].tolist()) <= set(chosen.tolist())


def test_balanced_work_is_between_the_speeds_of_both_kinds():
    """By hand: hosts that are twice and half as fast as each other share work in the harmonic mean of their steps."""
    setting = setting_for(job_of(batch=64), MIXED)
    grid, _ = enumerate_space(setting, SpaceOptions())
    alone = [
        estimate_step(setting_for(job_of(batch=64), find_cluster(name, hosts=2)), grid).step_time_s
        for name in ("dgx-h100", "l20")
    ]

    assert balanced_s(setting, grid).tolist() == pytest.approx((2 / (1 / alone[0] + 1 / alone[1])).tolist())
