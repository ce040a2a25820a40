"""Which configurations may fit under one of several profiles, against one prediction after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime, other_runtimes, runtime_names
from costmodels.job.uneven_work import Assignment
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.memory.plausible import may_fit_under_any
from tests.support.settings.random_settings import MIXED, cases, grid_of, job_of, setting_for


def one_after_the_other(setting, profiles, grid, headroom):
    """Return the same mask by a whole prediction of every profile."""
    masks = [
        estimate_memory(setting.predicted_by(profile), grid).may_fit(headroom, memory_error_of(profile))
        for profile in profiles
    ]
    return np.any([np.zeros(len(grid), dtype=np.bool_), *masks], axis=0)


@pytest.mark.slow
@given(
    case=cases(max_configs=30),
    names=st.sets(st.sampled_from(runtime_names()), min_size=1),
    share=st.floats(0.6, 1.2),
    position=st.integers(0, 29),
)
def test_it_is_the_answer_of_one_profile_after_the_other(case, names, share, position):
    """A configuration may fit if it may by some profile's prediction, also where one of them just does or does not."""
    profiles = [find_runtime(name) for name in sorted(names)]
    one = case.grid.take(np.array([position % len(case.grid)]))
    memory = [estimate_memory(case.setting.predicted_by(profile), one) for profile in profiles]
    headroom = 1 - share * min(float((each.needed_bytes / each.capacity_bytes)[0]) for each in memory)

    found = may_fit_under_any(case.setting, profiles, case.grid, headroom)

    assert found.tolist() == one_after_the_other(case.setting, profiles, case.grid, headroom).tolist()


@pytest.mark.parametrize("left", [0.2, 0.25, 0.3, 0.35, 0.4, 0.5])
def test_uneven_work_on_unlike_hosts_is_answered_too(left):
    """Orders of hosts, uneven layers and micro-batches, and layers that always recompute, change no answer."""
    setting = setting_for(job_of(batch=16), MIXED)
    assignments = [
        Assignment(layers=layers, recomputed=recomputed, micro_batches=micro_batches, hosts=hosts)
        for layers in ((), (20, 12), (4, 28))
        for recomputed in ((), (0, 0), (2, 4))
        for micro_batches in ((), (3, 1), (1, 3))
        for hosts in ((), (1, 0))
    ]
    grid = grid_of(*(ParallelConfig(pp=2, tp=4, dp=2, mbs=4, assignment=one) for one in assignments))
    profiles = other_runtimes(setting.runtime)

    found = may_fit_under_any(setting, profiles, grid, 1 - left)

    assert found.tolist() == one_after_the_other(setting, profiles, grid, 1 - left).tolist()
