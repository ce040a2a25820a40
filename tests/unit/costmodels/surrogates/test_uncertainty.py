from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtri, stdtrit
from scipy.stats import t as student

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import CONSTANTS, find_prior
from costmodels.step.error_models import error_models
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.overheads import stalled_share
from costmodels.step.placement import place
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.uncertainty import (
    SIGMA,
    WIDE,
    half_width,
    likely_range,
    memory_half_width,
    stall_variance,
    step_uncertainty,
)
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

JOB, HOSTS = job_of(), find_cluster("dgx-h100", hosts=2)
GRID = grid_of(ParallelConfig(tp=2, dp=8, mbs=2), ParallelConfig(tp=8, pp=2, dp=1))
"""Large matrix products, and many small launches."""


def uncertainty(runtime):
    """The uncertainty of both configurations."""
    setting = setting_for(JOB, HOSTS, runtime)
    return step_uncertainty(setting, GRID, memory=estimate_memory(setting, GRID))


def own_profile(step_error, **changes):
    """A profile that was fitted to runs of the user's own cluster."""
    return replace(find_prior("megatron-core"), step_error=step_error, knows_cluster=True, **changes)


def exactly_known(step_error):
    """Such a profile whose constants are known without error."""
    return own_profile(step_error, log_errors=tuple((name, 0.0) for name in CONSTANTS))


def test_known_constants_leave_the_error_of_unseen_runs():
    """Where every constant is known exactly, the error is the profile's `step_error` and no constant dominates."""
    found = uncertainty(exactly_known(0.07))

    np.testing.assert_allclose(found.log_error, 0.07)
    assert found.dominant(0) == ()


def test_one_unknown_constant_is_propagated():
    """With one uncertain constant the error is what the step moves by when the constant does."""
    # the device sets the pace
    runtime = replace(exactly_known(1e-9), launch_s=1e-6, log_errors=(("matmul_efficiency", 0.1),))
    found = uncertainty(runtime)

    slower = runtime.with_constants({"matmul_efficiency": runtime.matmul_efficiency * np.exp(-0.1)})
    times = [estimate_step(setting_for(JOB, HOSTS, profile), GRID).step_time_s for profile in (runtime, slower)]
    np.testing.assert_allclose(found.log_error, np.log(times[1] / times[0]), rtol=0.15)
    assert np.all(found.log_error < 0.1)
    assert found.dominant(0)[0][0] == "matmul_efficiency"


def test_errors_are_not_counted_twice():
    """The error is the larger of what unseen runs showed and what the constants leave open, never their sum."""
    of_constants = uncertainty(own_profile(1e-9)).log_error

    for step_error in (0.001, 0.5):
        found = uncertainty(own_profile(step_error)).log_error
        np.testing.assert_allclose(found, np.maximum(step_error, of_constants))


def test_an_unseen_cluster_adds_an_error_with_heavy_tails():
    """Without any error of the constants, the shipped profile errs by Student's t of the catalog's scale."""
    model = error_models().step
    found = uncertainty(replace(exactly_known(0.01), knows_cluster=False))

    np.testing.assert_allclose(found.log_error, student.ppf(0.5 + SIGMA / 2, model.freedom) * model.unseen)
    np.testing.assert_allclose(found.log_error_95, student.ppf(0.975, model.freedom) * model.unseen)
    assert found.from_cluster == pytest.approx(found.log_error[0])
    assert (found.log_error_95 > 2 * found.log_error).all()


def test_both_parts_of_the_error_add_up_in_squares():
    """The interval of a shipped profile holds the unseen cluster and the constants, whose names tell what widens it."""
    found = uncertainty(find_prior("megatron-core"))

    parts = [found.from_cluster**2, *(effect**2 for effect in found.from_constants.values())]
    np.testing.assert_allclose(found.log_error**2, np.sum(np.broadcast_arrays(*parts), axis=0))
    assert (found.log_error > found.from_cluster).all()


def test_the_own_cluster_has_normal_errors():
    """Where the profile was fitted to the user's runs, 95% are 1.96 standard deviations and no cluster is unseen."""
    found = uncertainty(own_profile(0.3))

    np.testing.assert_allclose(found.log_error_95, 1.96 * found.log_error, rtol=1e-3)
    assert found.from_cluster == 0


def test_a_constant_that_a_run_lacks_adds_nothing():
    """A constant that a fact of the run has set to zero, or that a dense model does not use, has no share."""
    found = uncertainty(replace(find_prior("megatron-core"), stall_s=0.0))

    np.testing.assert_array_equal(found.from_constants["stall_s"], 0.0)
    np.testing.assert_array_equal(found.from_constants["expert_imbalance"], 0.0)


def test_the_range_is_symmetric_in_the_logarithm():
    """A range reaches as far down as up in the logarithm."""
    low, high = likely_range(4.0, np.log(2.0))

    assert (low, high) == (pytest.approx(2.0), pytest.approx(8.0))


def test_memory_on_an_unseen_cluster_has_the_catalogs_error():
    """The interval of memory is Student's t of the catalog's scale, wider without a profile of the framework."""
    models = error_models()
    found, unknown = (memory_half_width(find_prior(name), WIDE) for name in ("megatron-core", "unknown"))

    assert found == pytest.approx(student.ppf(0.975, models.memory.freedom) * models.memory.scale)
    assert unknown == pytest.approx(student.ppf(0.975, models.unknown_memory.freedom) * models.unknown_memory.scale)
    assert unknown > found


def test_memory_has_the_own_error_only_where_own_peaks_were_measured():
    """A profile fitted to the user's own peaks states their spread; one fitted to step times alone is doubted."""
    known = replace(own_profile(0.1), memory_error=0.05, knows_memory=True)

    assert memory_half_width(known, SIGMA) == pytest.approx(0.05, rel=1e-3)
    assert memory_half_width(replace(known, knows_memory=False), SIGMA) > 0.1


@pytest.mark.parametrize("share", [0.7, 0.95, 1.0, 1.3, 3.0])
def test_stalls_that_may_or_may_not_happen_are_a_coin_toss(share):
    """The variance is that of two outcomes, all micro-batches stall or none does, and vanishes where memory decides."""
    runtime = replace(find_prior("megatron-core"), stall_s=0.3)
    memory = estimate_memory(setting_for(JOB, HOSTS, runtime), GRID)
    memory = replace(memory, capacity_bytes=memory.peak_bytes / share)
    setting = setting_for(JOB, HOSTS, runtime)

    predicted_s = estimate_step(setting, GRID, memory=memory).step_time_s
    found = stall_variance(setting, GRID, predicted_s, memory=memory)

    chance = stalled_share(HOSTS, runtime, place(HOSTS, GRID).pp.domains, memory)
    calm = estimate_step(setting_for(JOB, HOSTS, replace(runtime, stall_s=0.0)), GRID, memory=memory).step_time_s
    certain = replace(memory, capacity_bytes=memory.peak_bytes / 1e6)
    stalled = estimate_step(setting, GRID, memory=certain).step_time_s
    outcomes = np.log([calm, stalled])
    mean = (1 - chance) * outcomes[0] + chance * outcomes[1]
    expected = (1 - chance) * (outcomes[0] - mean) ** 2 + chance * (outcomes[1] - mean) ** 2
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    if share == 1.0:
        assert (found > 0.01).all()
    if share == 3.0:
        assert (found < 1e-4).all()


@pytest.mark.parametrize("freedom", [None, 1, 2, 3, 4, 7, 30, 401])
@pytest.mark.parametrize("probability", [0.01, SIGMA, 0.9, WIDE, 0.999])
def test_half_widths_are_those_of_scipy(freedom, probability):
    """They are quantiles of the normal distribution and of Student's t, to twelve digits."""
    upper = 0.5 + probability / 2
    expected = ndtri(upper) if freedom is None else stdtrit(freedom, upper)

    assert half_width(freedom, probability) == pytest.approx(expected, rel=1e-12)
