"""Fit of a runtime profile's free constants to measured step times.

The fit is bounded least squares on the logarithm of predicted over measured step time, in the logarithms of the
constants, with a loss that is robust to outliers (Cauchy). The prior (CONSTANTS in runtime.py, or the profile's own
values) adds one residual per constant, so the result is the maximum a posteriori under Gaussian priors. A constant that
the data do not determine keeps its prior value and uncertainty. Uncertainties are those of the linearised problem, from
the inverse of J'J.

Letters: n runs, c constants and device speeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from costmodels.calibration.fidelity import by_setting, group_key, settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting, source_of
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import CONSTANTS, LayerResidual, RuntimeProfile
from costmodels.operators.kernels import KernelTime, cached_kernel_s
from costmodels.step.layer_residuals import Cell, cell_of, fit_residuals, layer_residual
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError

RUN_ERROR = 0.05
"""Expected standard deviation of a run's log error after a fit; larger errors count as outliers."""

RUNS_PER_GROUP = 10.0
"""Largest weight of a group, in runs: those of one model on one cluster share much of their error (assumed)."""

SPEED_ERROR = 0.05
"""Prior standard deviation of the log of a device's speed relative to its published figures."""

SPEED_BOUNDS = (0.6, 1.4)
DETERMINED = 0.5
"""Largest ratio of posterior to prior uncertainty for which a constant counts as determined by the data."""

MIN_RUNS = 3

RESIDUALS_WORTH = 0.9
"""Layer residuals are kept if they reduce the median error of held-out runs below this share."""

WIDE = 4.0
"""Scale of the first, wider loss, as a multiple of RUN_ERROR."""

QUICK_STEPS = 10
"""Largest number of steps of an unchecked fit; more steps change its median error by less than a tenth."""

DIFFERENCE = 1e-3
"""Step of finite differences in the logarithm of a constant."""

UNTOUCHED = 1e-6
"""Largest slope of a log step time over a constant's logarithm that counts as none throughout a fit."""

RENEWED = 2
"""Derivatives are computed anew after so many steps, and updated by Broyden's rule between. With 4, a fit of 123 runs
ended short of its minimum, in a flat valley."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """Timed run to fit to: a published row, or a trial of an earlier study.

    Attributes:
        group: Key that runs of one job on one cluster have in common; they share much of their error.
        source: Publisher of the run, or name of its study.
        measured: Measured setting of the run. Of its runtime only the facts count; the fit sets the constants.
        config: Parallelism configuration of the run.
        step_time_s: Measured step time.
    """

    group: Hashable
    source: str
    measured: MeasuredSetting
    config: ParallelConfig
    step_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedConstant:
    """Constant after a fit.

    Attributes:
        value: Most probable value.
        log_error: Standard deviation of the logarithm of the value.
        is_determined: Whether the data rather than the prior determined it.
        at_bound: Whether the fit ended at a bound of CONSTANTS.
    """

    value: float
    log_error: float
    is_determined: bool
    at_bound: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Fitted profile with statistics of its fit.

    Attributes:
        profile: Profile with the fitted constants.
        constants: Fitted value of each of CONSTANTS.
        device_speed: Fitted speed of each device of the runs.
        num_runs: Number of runs in the fit.
        sources: Sources of these runs.
        median_ape: Median absolute percentage error on the runs of the fit. It is no estimate of accuracy.
        step_error: Standard deviation of the log error on held-out runs of other models or clusters; the profile's
            former one if the runs are too alike to split.
        skipped: Number of runs left out, by reason.
    """

    profile: RuntimeProfile
    constants: Mapping[str, FittedConstant]
    device_speed: Mapping[str, FittedConstant]
    num_runs: int
    sources: tuple[str, ...]
    median_ape: float
    step_error: float
    skipped: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Runs that share a setting.

    Attributes:
        measured: Measured setting of all runs of the batch.
        grid: Configurations of the runs.
        memory: Memory estimates of the configurations.
        at: Positions of the runs among all runs.
        kernel_time: Times of the kernels; the fit changes their shares in training, but not the cached times alone.
    """

    measured: MeasuredSetting
    grid: ConfigGrid
    memory: MemoryEstimate
    at: np.ndarray
    kernel_time: KernelTime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Problem:
    """Least-squares problem of one runtime, prepared for repeated predictions.

    Attributes:
        batches: Runs grouped by setting.
        log_measured: Logarithm of the measured step times [n].
        weight: Weight of each run's residual [n].
        devices: Devices whose speed is fitted.
        prior: Prior means of the log constants and speeds [c].
        prior_error: Prior standard deviations of the log constants and speeds [c].
        lower: Logarithms of the lower bounds [c].
        upper: Logarithms of the upper bounds [c].
        touched: Batches whose predictions depend on each entry of theta [c]; all of them where nothing was found yet.
    """

    batches: tuple[_Batch, ...]
    log_measured: FloatArray
    weight: FloatArray
    devices: tuple[str, ...]
    prior: FloatArray
    prior_error: FloatArray
    lower: FloatArray
    upper: FloatArray
    touched: tuple[tuple[_Batch, ...], ...]

    def log_predicted(self, theta: FloatArray) -> FloatArray:
        """Return the log predicted step times [n] at the log constants and speeds [c]."""
        return self._predict(theta, self.batches, np.empty(len(self.log_measured)))

    def _predict(self, theta: FloatArray, batches: Sequence[_Batch], predicted: FloatArray) -> FloatArray:
        """Write the log predicted step times of some batches into `predicted` [n], and return it."""
        values = np.exp(theta)
        changes = dict(zip(CONSTANTS, values[: len(CONSTANTS)].tolist(), strict=True))
        speeds = dict(zip(self.devices, values[len(CONSTANTS) :].tolist(), strict=True))
        for batch in batches:
            own = batch.measured.setting.runtime
            # a fact of the run may fix a constant at zero: balanced routing has no imbalance
            runtime = replace(
                own,
                device_speed=tuple({**dict(own.device_speed), **speeds}.items()),
                residuals=(),
                **{name: value for name, value in changes.items() if getattr(own, name) != 0},
            )
            estimate = estimate_step(
                replace(batch.measured.setting, runtime=runtime),
                batch.grid,
                kernel_time=batch.kernel_time,
                memory=batch.memory,
            )
            predicted[batch.at] = np.log(estimate.step_time_s)
        return predicted

    def slopes(self, theta: FloatArray, columns: np.ndarray) -> FloatArray:
        """Compute derivatives of `log_predicted` by chosen entries of theta [n, len(columns)], as differences."""
        base = self.log_predicted(theta)
        slopes = np.empty((len(base), len(columns)))
        for position, column in enumerate(columns):
            # step towards the inside of the bounds
            step = DIFFERENCE if theta[column] + DIFFERENCE <= self.upper[column] else -DIFFERENCE
            moved = theta.copy()
            moved[column] += step
            slopes[:, position] = (self._predict(moved, self.touched[column], base.copy()) - base) / step
        return slopes

    def touching(self, theta: FloatArray) -> _Problem:
        """Return the problem with, for each entry of theta, only the batches that depend on it near `theta` [c]."""
        slopes = np.abs(self.slopes(theta, np.arange(len(theta)))) > UNTOUCHED
        touched = (tuple(batch for batch in self.batches if column[batch.at].any()) for column in slopes.T)
        return replace(self, touched=tuple(touched))

    def jacobian(self, theta: FloatArray, columns: np.ndarray) -> FloatArray:
        """Compute derivatives of `residuals` by the chosen entries of theta [n + c, len(columns)]."""
        # a prior's residual depends on its own constant alone, so its block is diagonal
        data = self.weight[:, None] * self.slopes(theta, columns) / RUN_ERROR
        priors = np.zeros((len(theta), len(columns)))
        priors[columns, np.arange(len(columns))] = 1.0 / self.prior_error[columns]
        return np.concatenate([data, priors])

    def residuals(self, theta: FloatArray) -> FloatArray:
        """Return the runs' errors in units of RUN_ERROR, then the priors' in units of their deviations [n + c]."""
        data = self.weight * (self.log_predicted(theta) - self.log_measured) / RUN_ERROR
        return np.concatenate([data, (theta - self.prior) / self.prior_error])


def calibrate(
    runs: Sequence[MeasuredRun], profile: RuntimeProfile, *, on_progress: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Fit the constants of `profile` to those of `runs` that are timed.

    Args:
        runs: Measured runs of this runtime.
        profile: Profile of the runtime; its constants and their errors are the prior.
        on_progress: Callback with a line of text before each fit.

    Raises:
        ConfigError: fewer than MIN_RUNS runs can be used.
    """
    timed = [run for run in runs if run.step_time_s is not None and source_of(run).timed]
    kept, settings, skipped = settings_of(timed, {profile.name: profile}, profile.name)
    own = [
        TimedRun(
            group=group_key(run), source=run.source, measured=measured, config=run.config, step_time_s=run.step_time_s
        )
        for run, measured in zip(kept, settings, strict=True)
        if run.step_time_s is not None
    ]
    return calibrate_timed(own, profile, skipped=skipped, on_progress=on_progress)


def calibrate_timed(
    runs: Sequence[TimedRun],
    profile: RuntimeProfile,
    *,
    skipped: Mapping[str, int] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Fit the constants of `profile` to runs with known settings; see `calibrate`.

    Args:
        runs: Timed runs of this runtime.
        profile: Profile of the runtime; its constants and their errors are the prior.
        skipped: Number of runs that were left out before, by reason.
        on_progress: Callback with a line of text before each fit.

    Raises:
        ConfigError: fewer than MIN_RUNS runs.
    """
    problem = _prepare_problem(runs, profile)
    on_progress(f"fitting {profile.name} to {len(runs)} runs")
    theta, errors = _solve(problem)
    fitted = _name_constants(problem, theta, errors)
    near = dict(zip((*CONSTANTS, *problem.devices), theta.tolist(), strict=True))
    step_error, residuals_help = _check_held_out(runs, profile, near, on_progress)
    result = _update_profile(profile, fitted, problem.devices, step_error)
    # residuals of layers come on top of the constants, if the held-out check has shown their use
    error = problem.log_predicted(theta) - problem.log_measured
    if residuals_help:
        residuals = fit_residuals(_cells_of_runs(runs), -error)
        error = error + _layer_residuals(residuals, runs)
        result = replace(result, residuals=residuals)
    return Calibration(
        profile=result,
        constants={name: fitted[name] for name in CONSTANTS},
        device_speed={name: fitted[name] for name in problem.devices},
        num_runs=len(runs),
        sources=tuple(sorted({run.source for run in runs})),
        median_ape=float(np.median(np.abs(np.expm1(error)))),
        step_error=step_error,
        skipped=dict(skipped or {}),
    )


def fit_to_runs(runs: Sequence[TimedRun], profile: RuntimeProfile) -> RuntimeProfile:
    """Fit the constants once, without held-out checks, for callers that examine the errors themselves.

    Raises:
        ConfigError: fewer than MIN_RUNS runs.
    """
    problem = _prepare_problem(runs, profile)
    theta, errors = _solve(problem, QUICK_STEPS)
    # robust spread, as in a held-out check but of the fitted runs themselves
    spread = float(np.quantile(np.abs(problem.log_predicted(theta) - problem.log_measured), 0.683))
    return _update_profile(profile, _name_constants(problem, theta, errors), problem.devices, spread)


def calibrate_all(
    runs: Sequence[MeasuredRun],
    profile_of: Callable[[str], RuntimeProfile],
    runtime: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Calibration]:
    """Calibrate each runtime that `runs` used; runtimes with fewer than MIN_RUNS runs are left out."""
    by_runtime: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_runtime.setdefault(runtime or source_of(run).runtime, []).append(run)
    fits = {}
    for name, own in by_runtime.items():
        # a runtime with fewer runs keeps its profile
        if sum(run.step_time_s is not None and source_of(run).timed for run in own) >= MIN_RUNS:
            fits[name] = calibrate(own, profile_of(name), on_progress=on_progress)
    return fits


def _prepare_problem(runs: Sequence[TimedRun], profile: RuntimeProfile) -> _Problem:
    if len(runs) < MIN_RUNS:
        raise ConfigError(f"a fit needs at least {MIN_RUNS} timed runs of known devices, but got {len(runs)}")
    devices = tuple(sorted({device.name for run in runs for device in run.measured.setting.cluster.devices}))
    errors = dict(profile.log_errors)
    prior = [getattr(profile, name) for name in CONSTANTS] + [profile.speed_of(name) for name in devices]
    bounds = [(constant.lower, constant.upper) for constant in CONSTANTS.values()] + [SPEED_BOUNDS] * len(devices)
    # a large group counts like RUNS_PER_GROUP runs: its residuals, in squares, have weights that sum to that
    group_sizes = Counter(run.group for run in runs)
    batches = []
    for measured, at in by_setting([run.measured for run in runs]).items():
        grid = ConfigGrid.from_configs([runs[i].config for i in at])
        memory = estimate_memory(measured.setting, grid)
        kernel_time = cached_kernel_s()
        batches.append(_Batch(measured=measured, grid=grid, memory=memory, at=np.array(at), kernel_time=kernel_time))
    return _Problem(
        batches=tuple(batches),
        log_measured=np.log(np.array([run.step_time_s for run in runs], dtype=np.float64)),
        weight=np.sqrt([min(1.0, RUNS_PER_GROUP / group_sizes[run.group]) for run in runs]),
        devices=devices,
        prior=np.log(prior),
        prior_error=np.array([errors[name] for name in CONSTANTS] + [SPEED_ERROR] * len(devices)),
        lower=np.log([low for low, _ in bounds]),
        upper=np.log([high for _, high in bounds]),
        touched=(tuple(batches),) * len(bounds),
    )


def _solve(
    problem: _Problem, max_steps: int = 30, near: Mapping[str, float] | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return the most probable theta [c] and its standard deviations [c].

    A loss that ignores outliers has many minima, so soft L1, which has only one for a linear model, finds the start for
    it. The model is not linear and all runs may be outliers at first, so a soft L1 that is WIDE times as wide comes
    before. Each of the three losses gets at most `max_steps` evaluations. Constants that no run depends on keep their
    values. The logarithms `near`, by the names of constants and devices, are those of a fit to more of such runs: the
    search starts there, with the last loss.
    """
    inside = 1e-6
    names = (*CONSTANTS, *problem.devices)
    start = problem.prior if near is None else np.array([near[name] for name in names])
    theta = np.clip(start, problem.lower + inside, problem.upper - inside)
    problem = problem.touching(theta)
    is_free = np.array([len(batches) > 0 for batches in problem.touched])
    theta = np.where(is_free, theta, np.clip(problem.prior, problem.lower + inside, problem.upper - inside))
    free = np.flatnonzero(is_free)

    def whole(part: FloatArray) -> FloatArray:
        values = theta.copy()
        values[free] = part
        return values

    part = theta[free]
    # each loss starts where the wider one before has ended, so that the last begins near the best minimum
    for loss in (_wide_soft_l1, _soft_l1, _cauchy) if near is None else (_cauchy,):
        found = least_squares(
            lambda values: problem.residuals(whole(values)),
            part,
            jac=_secant(
                lambda values: problem.residuals(whole(values)), lambda values: problem.jacobian(whole(values), free)
            ),
            bounds=(problem.lower[free], problem.upper[free]),
            loss=_loss_of_runs(loss, len(problem.log_measured)),
            x_scale=problem.prior_error[free],
            max_nfev=max_steps,
            ftol=1e-3,
            xtol=1e-3,
        )
        part = np.clip(found.x, problem.lower[free] + inside, problem.upper[free] - inside)
    # Laplace's approximation: the covariance is the inverse of J'J, whose rows are weighted by the robust loss
    errors = problem.prior_error.copy()
    errors[free] = np.sqrt(np.maximum(np.diag(np.linalg.pinv(found.jac.T @ found.jac)), 0.0))
    return whole(part), errors


def _secant(
    residuals: Callable[[FloatArray], FloatArray], jacobian: Callable[[FloatArray], FloatArray]
) -> Callable[[FloatArray], FloatArray]:
    """Return a function like `jacobian` that computes it on every RENEWED-th call only.

    Between these, the last one is updated by the change of the residuals along the step (Broyden 1965, his first
    method): one evaluation instead of one for each constant.
    """
    steps = count()
    at, value, slopes = np.empty(0), np.empty(0), np.empty((0, 0))

    def updated(values: FloatArray) -> FloatArray:
        nonlocal at, value, slopes
        before, at = at, values.copy()
        was, value = value, residuals(values)
        if next(steps) % RENEWED == 0:
            slopes = jacobian(values)
        else:
            step = at - before
            slopes = slopes + np.outer(value - was - slopes @ step, step / (step @ step))
        return slopes

    return updated


def _soft_l1(squared: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return 2 (sqrt(1 + z) - 1) of squared residuals z, and its first two derivatives."""
    root = np.sqrt(1.0 + squared)
    return 2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3


def _wide_soft_l1(squared: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return soft L1 for residuals in units that are WIDE times as large, and its first two derivatives."""
    value, first, second = _soft_l1(squared / WIDE**2)
    return WIDE**2 * value, first, second / WIDE**2


def _cauchy(squared: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return log(1 + z) of squared residuals z, and its first two derivatives."""
    inner = 1.0 + squared
    return np.log(inner), 1.0 / inner, -1.0 / inner**2


def _loss_of_runs(
    loss: Callable[[FloatArray], tuple[FloatArray, FloatArray, FloatArray]], num_runs: int
) -> Callable[[FloatArray], FloatArray]:
    """Apply `loss` to the runs' residuals and a plain square to the priors', in scipy's form [3, n + c]."""

    def rho(squared: FloatArray) -> FloatArray:
        rows = [squared, np.ones_like(squared), np.zeros_like(squared)]
        return np.stack(
            [np.concatenate([own, plain[num_runs:]]) for own, plain in zip(loss(squared[:num_runs]), rows, strict=True)]
        )

    return rho


def _name_constants(problem: _Problem, theta: FloatArray, errors: FloatArray) -> dict[str, FittedConstant]:
    # in logarithms, so a thousandth of the value
    at_bound = np.minimum(theta - problem.lower, problem.upper - theta) < 1e-3
    return {
        name: FittedConstant(
            value=float(np.exp(theta[i])),
            log_error=float(errors[i]),
            is_determined=bool(errors[i] < DETERMINED * problem.prior_error[i]),
            at_bound=bool(at_bound[i]),
        )
        for i, name in enumerate((*CONSTANTS, *problem.devices))
    }


def _update_profile(
    profile: RuntimeProfile, fitted: Mapping[str, FittedConstant], devices: Sequence[str], step_error: float
) -> RuntimeProfile:
    constants: dict[str, Any] = {name: fitted[name].value for name in CONSTANTS}
    return replace(
        profile,
        **constants,
        device_speed=tuple({**dict(profile.device_speed), **{name: fitted[name].value for name in devices}}.items()),
        log_errors=tuple((name, fitted[name].log_error) for name in CONSTANTS),
        step_error=step_error,
    )


def _check_held_out(
    runs: Sequence[TimedRun], profile: RuntimeProfile, near: Mapping[str, float], on_progress: Callable[[str], None]
) -> tuple[float, bool]:
    """Fit to one half of the models and predict the other half, both ways. Each fit starts at that to all runs.

    Return the spread of the log error, and whether layer residuals reduce it. The model of a run determines its half.
    If all runs have one model, devices and sequence length do.
    """
    # runs of one model resemble each other too much to test a fit to one by another
    keys = [run.measured.setting.job.model.name for run in runs]
    if len(set(keys)) < 2:
        settings = [run.measured.setting for run in runs]
        keys = [f"{setting.cluster.num_devices} {setting.job.sequence_length}" for setting in settings]
    parts = {key: index % 2 for index, key in enumerate(sorted(set(keys)))}
    side = np.array([parts[key] for key in keys])
    if len(parts) < 2 or min(np.sum(side == 0), np.sum(side == 1)) < MIN_RUNS:
        return profile.step_error, False
    plain, corrected = [], []
    for part in (0, 1):
        on_progress(f"checking {profile.name} on the {np.sum(side == part)} held-out runs")
        seen = [run for run, own in zip(runs, side, strict=True) if own != part]
        problem = _prepare_problem(seen, profile)
        theta, _ = _solve(problem, near=near)
        # layer residuals learn from the fit's errors, and count only if they help on the other half
        residuals = fit_residuals(_cells_of_runs(seen), problem.log_measured - problem.log_predicted(theta))
        fitted = _update_profile(
            profile, _name_constants(problem, theta, np.zeros(len(theta))), problem.devices, profile.step_error
        )
        unseen = [_with_constants(run, fitted) for run, own in zip(runs, side, strict=True) if own == part]
        check = _prepare_problem(unseen, fitted)
        error = check.log_predicted(check.prior) - check.log_measured
        plain.append(np.abs(error))
        corrected.append(np.abs(error + _layer_residuals(residuals, unseen)))
    before, after = np.concatenate(plain), np.concatenate(corrected)
    help_enough = bool(np.median(after) < RESIDUALS_WORTH * np.median(before))
    # robust spread: the share of a normal distribution within one standard deviation is 0.683
    return float(np.quantile(after if help_enough else before, 0.683)), help_enough


def _cells_of_runs(runs: Sequence[TimedRun]) -> list[Cell]:
    return [cell_of(run.measured.setting.cluster.device_names, run.measured.setting.job, run.config) for run in runs]


def _layer_residuals(residuals: Sequence[LayerResidual], runs: Sequence[TimedRun]) -> FloatArray:
    found = np.zeros(len(runs))
    for measured, at in by_setting([run.measured for run in runs]).items():
        grid = ConfigGrid.from_configs([runs[i].config for i in at])
        found[at] = layer_residual(residuals, measured.setting.cluster.device_names, measured.setting.job, grid)
    return found


def _with_constants(run: TimedRun, fitted: RuntimeProfile) -> TimedRun:
    """Return the run with its own facts and the constants of `fitted`."""
    facts = run.measured.setting.runtime
    constants = {name: getattr(fitted, name) for name in CONSTANTS if getattr(facts, name) != 0}
    runtime = replace(facts, **constants, device_speed=fitted.device_speed, residuals=())
    setting = replace(run.measured.setting, runtime=runtime)
    return replace(run, measured=replace(run.measured, setting=setting))
