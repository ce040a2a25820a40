from dataclasses import replace

import numpy as np
import pytest

from benchmarks.support import fidelity_figures
from costmodels.calibration.fidelity import Predictions, is_clean, kernels_of, predict, predict_unstated, settings_of
from costmodels.calibration.measured_runs import UnstatedRun
from costmodels.calibration.stated_setup import StatedSetup
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from tests.support.settings.synthetic_runs import small_model, timed_by, unmeasured_run, varied_runs

MODEL = small_model(2048)
MEASURED_S = (1.0, 1.1, 1.2, 1.3, 1.4)


def group(measured_s=MEASURED_S, **changes):
    """Runs of one group, told apart by their micro-batches; a step time of None failed."""
    configs = [ParallelConfig(tp=1, dp=1, mbs=2**position) for position in range(len(measured_s))]
    return [
        unmeasured_run(MODEL, config, step_time_s=seconds, is_failed=seconds is None, **changes)
        for config, seconds in zip(configs, measured_s, strict=True)
    ]


def said(step_time_s, fits=None, peak_bytes=None):
    """Predictions of as many runs."""
    count = len(step_time_s)
    return Predictions(
        step_time_s=np.array(step_time_s, dtype=np.float64),
        peak_memory_bytes=np.array([1e9] * count if peak_bytes is None else peak_bytes, dtype=np.float64),
        fits=np.array([True] * count if fits is None else fits),
    )


def judge(runs, predictions, *, step=0.1, memory=0.1):
    """Return the figures of groups and of all runs, for predictions that claim these errors."""
    step_widths, memory_widths = (
        {"covered_68": np.full(len(runs), error), "covered_95": np.full(len(runs), 2 * error)}
        for error in (step, memory)
    )
    errors = fidelity_figures.LogErrors(step=step_widths, memory=memory_widths)
    return fidelity_figures.judge(runs, predictions, errors)


def test_errors_and_regret_by_hand():
    """Median, mean and 90th percentile of |predicted / measured - 1|.

    Where the third is predicted fastest, choosing it costs 20%, and the true best is second in that order.
    """
    _, overall = judge(group(), said(np.array(MEASURED_S) * [1.1, 0.8, 1.3, 1.0, 1.0]))
    (figures,), _ = judge(group(), said([1.0, 1.1, 0.9, 1.3, 1.4]))

    errors = [overall[name] for name in ("median_ape", "mean_ape", "p90_ape")]
    assert errors == pytest.approx([0.1, 0.12, 0.26])
    assert (figures["rank_of_best"], figures["regret"], figures["tau"]) == (2, pytest.approx(0.2), pytest.approx(0.6))


def test_small_groups_are_not_ranked():
    """Four configurations have errors, but neither tau nor regret; repeats of one do not make five."""
    runs = group(MEASURED_S[:4])
    (figures,), overall = judge([*runs, runs[0]], said([*MEASURED_S[:4], 1.0]))

    assert (figures["n"], figures["num_configs"]) == (5, 4)
    assert (figures["tau"], figures["regret"]) == (None, None)
    assert (overall["median_tau"], overall["mean_regret"], overall["num_ranked_groups"]) == (None, None, 0)


def test_what_is_called_infeasible_would_not_be_tried():
    """A best that is called infeasible is counted, and stands behind all that fits, as in a study.

    Of three failed runs two are called infeasible; they have no part in errors and order.
    """
    (figures,), overall = judge(group(), said(MEASURED_S, fits=[False, True, True, True, True]))
    failed = group((1.0, 1.1, None, None, None))
    _, of_failed = judge(failed, said([1.0, 1.1, 9.0, 9.0, 9.0], fits=[True, True, False, False, True]))

    assert figures["best_called_infeasible"] is True
    assert figures["regret"] == pytest.approx(0.1)
    assert (overall["best_called_infeasible"], overall["ok_called_feasible"]) == (1, pytest.approx(0.8))
    assert (of_failed["n"], of_failed["failed_called_infeasible"], of_failed["median_ape"]) == (
        2,
        pytest.approx(2 / 3),
        0,
    )


def test_memory_is_judged_where_a_peak_was_measured():
    """The error of peaks takes the runs that have one, timed or not."""
    runs = [replace(run, peak_memory_bytes=10**9) for run in group()[:2]] + group()[2:]
    _, overall = judge(runs, said(MEASURED_S, peak_bytes=[1.1e9, 1.3e9, 5e9, 5e9, 5e9]))

    assert overall["memory_n"] == 2
    assert overall["memory_median_ape"] == pytest.approx(0.2)


def test_intervals_hold_the_share_of_runs_that_lie_inside_them():
    """One deviation and two are counted for step times and for peaks; what was not measured does not count."""
    runs = [replace(run, peak_memory_bytes=10**9) for run in group()[:4]] + group()[4:]
    step_s = np.array(MEASURED_S) * np.exp([0.05, -0.09, 0.15, -0.19, 0.21])
    peaks = 1e9 * np.exp([0.01, 0.03, 0.03, 0.05, 9.0])
    _, overall = judge(runs, said(step_s, peak_bytes=peaks), step=0.1, memory=0.02)
    _, untold = judge(group(), said(MEASURED_S))

    assert (overall["covered_68"], overall["covered_95"]) == (pytest.approx(0.4), pytest.approx(0.8))
    assert (overall["memory_covered_68"], overall["memory_covered_95"]) == (pytest.approx(0.25), pytest.approx(0.75))
    assert (untold["covered_68"], untold["memory_covered_95"]) == (1.0, None)


@pytest.mark.parametrize(
    ("change", "num_groups"),
    [
        ({"source": "other"}, 2),
        ({"device": "A100-SXM-80"}, 2),
        ({"precision": "fp16"}, 2),
        ({"sequence_length": 1024}, 2),
        ({"global_batch_size": 64}, 2),
        ({"model": small_model(4096)}, 2),
        ({"notes": "mbs 4; attention kernel flash2"}, 2),
        ({"stated": StatedSetup(link="roce")}, 2),
        ({"config": ParallelConfig(mbs=64, recompute="full", zero_stage=3)}, 1),
    ],
)
def test_what_makes_a_group(change, num_groups):
    """Runs that differ in anything but their configuration (recomputation is of it) are in different groups."""
    groups, overall = judge([*group(), *(replace(run, **change) for run in group())], said([*MEASURED_S, *MEASURED_S]))

    assert overall["num_groups"] == num_groups
    assert sum(figures["num_configs"] for figures in groups) == (10 if num_groups == 2 else 6)


@pytest.mark.parametrize(
    ("notes", "kernels"),
    [
        ("A100; attention kernel flash2; RMSNorm kernel off", "attention kernel flash2; RMSNorm kernel off"),
        ("no RMSNorm kernel, step derived", "no RMSNorm kernel"),
        ("kernel launches bound it; attention dropout", ""),
    ],
)
def test_kernels_are_those_that_the_remarks_name(notes, kernels):
    """Clauses about the attention and the norm kernel count, and nothing else that speaks of kernels."""
    assert kernels_of(notes) == kernels


def test_tags_make_a_run_unclean():
    """The three tags of a run's notes say that its throughput is not to be explained."""
    tagged = ("", "LOW-MFU", "a; OUTLIER 0.3", "SUSPECT")

    assert [is_clean(group(notes=notes)[0]) for notes in tagged] == [True, False, False, False]


def test_unknown_devices_are_counted_not_raised():
    """A run on a device that the catalog lacks falls with its reason; the others have settings."""
    runs, settings, skipped = settings_of([*group(), *group(device="Abacus-9000")], {})

    assert len(runs) == len(settings) == 5
    assert list(skipped.values()) == [5]
    assert "Abacus-9000" in next(iter(skipped))


def test_predictions_are_those_of_each_runs_own_setting():
    """Runs predicted together get what each gets alone."""
    runs = varied_runs()
    alone = [run.step_time_s for run in timed_by(runs, find_runtime("megatron-core"), np.zeros(len(runs)))]
    kept, settings, _ = settings_of(runs, {}, "megatron-core")

    np.testing.assert_allclose(predict(kept, settings).step_time_s, alone)


@pytest.mark.parametrize("runtime", ["megatron-core", "torchtitan", "llm-foundry"])
def test_unstated_recomputation_is_predicted_in_every_mode_of_the_runtime(runtime):
    """A run of unknown recomputation gets what it would get in each mode that its runtime offers, more work later."""
    runs = [*varied_runs()[:3], *group((1.0,), device="Abacus-9000")]
    ranges, skipped = predict_unstated([UnstatedRun(run=run) for run in runs], {}, runtime)
    modes = find_runtime(runtime).recompute_modes

    assert len(ranges) == 3
    assert skipped.total() == 1
    for each, run in zip(ranges, runs, strict=False):
        alone = [replace(run, config=replace(run.config, recompute=mode)) for mode in modes]
        expected = predict(*settings_of(alone, {}, runtime)[:2])
        assert list(each.step_time_s) == list(modes)
        np.testing.assert_allclose(list(each.step_time_s.values()), expected.step_time_s)
        assert each.fits == tuple(mode for mode, fit in zip(modes, expected.fits, strict=True) if fit)
        assert each.step_time_s["none"] < each.step_time_s["full"]
