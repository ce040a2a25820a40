from dataclasses import replace

import numpy as np
import pytest

from costmodels.calibration.fitting import SPEED_BOUNDS, calibrate, calibrate_all
from costmodels.job.runtime import CONSTANTS, find_prior
from hardware.io.errors import ConfigError
from tests.support.settings.synthetic_runs import timed_by, varied_runs

PRIOR = find_prior("megatron-core")
TRUE = {"matmul_efficiency": 0.7, "network_efficiency": 0.5}
TRUTH = PRIOR.with_constants(TRUE)


@pytest.fixture(scope="module")
def runs():
    """Sixteen runs, measured with a noise of 1%."""
    configured = varied_runs()
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(configured))
    return timed_by(configured, TRUTH, noise)


@pytest.fixture(scope="module")
def fit(runs):
    """What calibration makes of ten of them, five of either model."""
    return calibrate(runs[3:13], PRIOR)


def errors(fit, runs):
    """Log of predicted over measured step times under a fitted profile."""
    clean = timed_by(runs, fit.profile, np.zeros(len(runs)))
    return np.log([a.step_time_s / b.step_time_s for a, b in zip(clean, runs, strict=True)])


@pytest.mark.slow
def test_a_fit_recovers_the_constants_that_made_the_runs(fit):
    """The truth lies within three standard deviations of what was fitted, and nearer than the guess before."""
    for name, true in TRUE.items():
        fitted = fit.constants[name]
        miss = abs(np.log(fitted.value / true))
        assert miss < 3 * fitted.log_error
        assert miss < abs(np.log(getattr(PRIOR, name) / true))


def test_a_fit_explains_its_runs(fit, runs):
    """The fitted profile predicts the runs to within their noise, which the profile before did not."""
    assert fit.num_runs == 10
    assert fit.median_ape < 0.03
    assert np.median(np.abs(errors(fit, runs))) < 0.03
    before = timed_by(runs, PRIOR, np.zeros(len(runs)))
    assert np.median([abs(a.step_time_s / b.step_time_s - 1) for a, b in zip(before, runs, strict=True)]) > 0.1


def test_what_the_runs_cannot_tell_stays_and_says_so(fit):
    """Dense models say nothing of experts, nor one host of stragglers: value and uncertainty stay those before."""
    known = dict(PRIOR.log_errors)
    for name in ("expert_imbalance", "grouped_matmul_efficiency", "straggler_share"):
        fitted = fit.constants[name]
        assert not fitted.is_determined
        assert fitted.value == pytest.approx(getattr(PRIOR, name), rel=1e-3)
        assert fitted.log_error == pytest.approx(known[name], rel=1e-3)


@pytest.mark.slow
def test_an_outlier_does_not_move_a_fit(runs):
    """One run that took five times as long leaves the predictions near the measured times of the others."""
    own = runs[8:]
    spoilt = calibrate([replace(own[0], step_time_s=5 * own[0].step_time_s), *own[1:]], PRIOR)

    assert np.max(np.abs(errors(spoilt, own))) < 0.06


@pytest.mark.slow
def test_constants_stay_inside_their_bounds(runs):
    """Runs that no physical constants explain end at a bound, which is told, and never beyond."""
    impossible = [replace(run, step_time_s=run.step_time_s / 3) for run in runs[8:]]
    anything_goes = replace(PRIOR, log_errors=tuple((name, 3.0) for name in CONSTANTS))
    found = calibrate(impossible, anything_goes)

    for name, fitted in found.constants.items():
        assert CONSTANTS[name].lower * 0.999 <= fitted.value <= CONSTANTS[name].upper * 1.001
    for fitted in found.device_speed.values():
        assert SPEED_BOUNDS[0] * 0.999 <= fitted.value <= SPEED_BOUNDS[1] * 1.001
    assert any(fitted.at_bound for fitted in (*found.constants.values(), *found.device_speed.values()))


def test_the_profile_holds_what_was_fitted(fit):
    """The new profile has the fitted constants, their errors and the device's speed; its facts are the old ones."""
    for name, fitted in fit.constants.items():
        assert getattr(fit.profile, name) == fitted.value
    assert dict(fit.profile.log_errors) == {name: fitted.log_error for name, fitted in fit.constants.items()}
    assert fit.profile.speed_of("H100-SXM-80") == fit.device_speed["H100-SXM-80"].value
    assert fit.profile.rule_set == PRIOR.rule_set
    assert fit.profile.step_error == fit.step_error


def test_too_few_runs_are_refused(runs):
    """A fit to two runs is a mistake that the message explains; among many runtimes such a one is passed over."""
    with pytest.raises(ConfigError, match="at least 3 timed runs of known devices, but got 2"):
        calibrate(runs[:2], PRIOR)
    assert calibrate_all(runs[:2], find_prior) == {}


@pytest.mark.slow
def test_runs_of_unknown_devices_are_left_out(runs):
    """A run of a device that the catalog lacks is skipped with its reason, and the others are fitted."""
    found = calibrate([*runs[:4], replace(runs[4], device="Abacus-9000")], PRIOR)

    assert found.num_runs == 4
    assert sum(found.skipped.values()) == 1
    assert "Abacus-9000" in next(iter(found.skipped))
