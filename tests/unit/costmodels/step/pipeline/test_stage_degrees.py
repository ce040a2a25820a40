"""Stages with tensor degrees of their own: closed form, memory and simulator agree with pipelines of like stages."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import other_runtimes
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory, stage_memory
from costmodels.step.memory.plausible import may_fit_under_any
from costmodels.step.pipeline.stage_degrees import most_slices, stage_tp_error, stage_variants, widest_variant
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

MIXED = cluster_from_mapping({"groups": [{"name": "dgx-h100", "hosts": 2}, {"name": "dgx-a100", "hosts": 2}]}, Path())
LIKE = find_cluster("dgx-h100", hosts=4)
JOB = job_of("llama-7b", batch=64, sequence_length=2048)


def with_degrees(config, *degrees, **work):
    """The configuration with a tensor degree for each stage."""
    return replace(config, assignment=Assignment(stage_tp=degrees, **work))


@st.composite
def unlike(draw):
    """Draw a configuration for 32 devices whose stages have one of two tensor degrees."""
    pp = draw(st.sampled_from([2, 4]))
    low, high = draw(st.sampled_from([(1, 2), (2, 4), (1, 4), (2, 8)]))
    dp, mbs = 32 // pp // low, draw(st.sampled_from([1, 2]))
    cut = draw(st.integers(1, pp - 1))
    config = ParallelConfig(pp=pp, tp=low, dp=dp, mbs=mbs)
    if draw(st.booleans()):
        return with_degrees(config, *(low,) * cut, *(high,) * (pp - cut))
    first = ParallelConfig(pp=pp, tp=high, dp=dp * low // high, mbs=mbs * high // low)
    return with_degrees(first, *(high,) * cut, *(low,) * (pp - cut))


@pytest.mark.parametrize(("cluster", "within"), [(LIKE, 0.01), (MIXED, 1e-12)], ids=["like", "mixed"])
def test_like_degrees_are_an_ordinary_pipeline(cluster, within):
    """If every stage has the configuration's tp, time, memory and simulation are those without stage_tp.

    On like hosts, formulas stand in place of timed passes.
    """
    setting = setting_for(JOB, cluster)
    plain = ParallelConfig(pp=4, tp=4, dp=2, mbs=2)
    same = with_degrees(plain, 4, 4, 4, 4)

    without, with_ = (estimate_step(setting, grid_of(config)) for config in (plain, same))
    assert with_.step_time_s[0] == pytest.approx(without.step_time_s[0], rel=within)
    assert {part: own[0] for part, own in with_.breakdown_s.items()} == pytest.approx(
        {part: own[0] for part, own in without.breakdown_s.items()}, abs=within * without.step_time_s[0]
    )
    peaks = [estimate_memory(setting, grid_of(config)).peak_bytes[0] for config in (plain, same)]
    assert peaks[1] == pytest.approx(peaks[0])
    assert simulate_step(setting, same).step_time_s == simulate_step(setting, plain).step_time_s


@given(unlike())
@settings(max_examples=40)
def test_every_stage_needs_the_memory_of_its_variant(config):
    """A stage needs what it needs where all stages have its degrees, and the fullest stage counts."""
    setting = setting_for(JOB, MIXED)
    variants = {tp: stage_memory(setting, one).peak_bytes for tp, one in stage_variants(config).items()}
    found = stage_memory(setting, config)
    (peak,), (capacity,) = (
        getattr(estimate_memory(setting, grid_of(config)), name) for name in ("peak_bytes", "capacity_bytes")
    )

    assert found.peak_bytes.tolist() == [variants[tp][stage] for stage, tp in enumerate(config.assignment.stage_tp)]
    assert peak / capacity == (found.peak_bytes / found.capacity_bytes).max()


@given(unlike())
@settings(max_examples=40)
def test_a_step_is_between_those_of_its_variants(config):
    """On like hosts a pipeline of two degrees is about as fast as the faster of both or slower, and not slower than the
    slower one, up to its further messages and the waits for unlike stages.
    """
    setting = setting_for(JOB, LIKE)
    found, *variants = (
        estimate_step(setting, grid_of(one)).step_time_s[0] for one in (config, *stage_variants(config).values())
    )

    assert 0.95 * min(variants) < found < 1.1 * max(variants)


@pytest.mark.slow
@given(unlike(), st.sampled_from([LIKE, MIXED]))
@settings(max_examples=25)
def test_the_simulator_agrees_as_well_as_for_like_stages(config, cluster):
    """Closed form and simulator differ by at most 10% more than they do for the variants."""
    setting = setting_for(JOB, cluster)

    def log_ratio(one):
        closed_s = estimate_step(setting, grid_of(one)).step_time_s[0]
        return math.log(closed_s / simulate_step(setting, one).step_time_s)

    of_variants = [log_ratio(one) for one in stage_variants(config).values()]
    assert min(of_variants) - 0.1 < log_ratio(config) < max(of_variants) + 0.1


def test_replicas_get_micro_batches_that_keep_the_flow():
    """A stage of twice the tensor degree has half the replicas and twice the micro-batch: all have as many of them."""
    config = with_degrees(ParallelConfig(pp=4, tp=2, dp=4, mbs=1), 2, 2, 4, 4)
    variants = stage_variants(config)

    assert {(one.tp, one.dp, one.mbs) for one in variants.values()} == {(2, 4, 1), (4, 2, 2)}
    assert widest_variant(config) == variants[4]
    assert len({one.dp * one.mbs for one in variants.values()}) == 1
    assert len({one.num_devices for one in variants.values()}) == 1
    assert most_slices(config) == 2


@pytest.mark.parametrize(
    ("degrees", "changes", "part"),
    [
        ((2, 2, 4), {}, "4 degrees, one per stage"),
        ((4, 4, 2, 2), {}, "begin with tp=2"),
        ((2, 2, 4, 4), {"vpp": 2}, "vpp=1"),
        ((2, 2, 4, 4), {"sequence_parallel": False}, "needs sequence_parallel"),
        ((2, 2, 1, 1), {}, "must divide"),
        ((2, 2, 16, 16), {}, "must divide"),
        ((2, 2, 0, 4), {}, "at least 1"),
    ],
)
def test_degrees_that_cannot_work_are_explained(degrees, changes, part):
    """Each rule of unlike degrees is refused in words."""
    config = with_degrees(replace(ParallelConfig(pp=4, tp=2, dp=4), **changes), *degrees)

    assert part in stage_tp_error(JOB, config)


def test_plausible_profiles_judge_unlike_stages_too():
    """Whether a configuration may fit under some profile is asked of each profile's memory of its stages."""
    setting = setting_for(JOB, MIXED)
    config = with_degrees(ParallelConfig(pp=2, tp=1, dp=16, mbs=8), 1, 8)
    profiles = (setting.runtime, *other_runtimes(setting.runtime))
    both = grid_of(config, ParallelConfig(pp=4, tp=4, dp=2))

    fits = may_fit_under_any(setting, profiles, both, 0.08)
    alone = [may_fit_under_any(setting, [profile], both, 0.08) for profile in profiles]
    assert fits.tolist() == np.any(alone, axis=0).tolist()
    assert fits[1]
