from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.step.layer_residuals import cell_of, fit_residuals, layer_residual
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

JOB = job_of(sequence_length=4096, batch=64)
CONFIG = ParallelConfig(tp=4, dp=2, mbs=2)
CELL = cell_of("H100-SXM-80", JOB, CONFIG)


def test_a_cell_is_the_layers_that_one_rank_computes():
    """Context parallelism halves the tokens of a rank and so makes another cell; pipelining and replicas do not."""
    assert CELL == ("H100-SXM-80", 4096, 4, 8192, 4096)
    assert cell_of("H100-SXM-80", JOB, ParallelConfig(tp=4, dp=1, pp=2, mbs=2)) == CELL
    assert cell_of("H100-SXM-80", JOB, ParallelConfig(tp=4, cp=2, mbs=2)) != CELL


def test_many_runs_of_a_cell_give_back_their_median():
    """A cell that many runs agree on is corrected by nearly what they say."""
    residuals = fit_residuals([CELL] * 50, np.full(50, 0.2))

    assert layer_residual(residuals, "H100-SXM-80", JOB, grid_of(CONFIG))[0] == pytest.approx(0.2, rel=0.15)


def test_few_runs_say_less_and_two_say_nothing():
    """The fewer runs a cell has, the less of their error it takes; two are no evidence."""
    many, few, two = (
        layer_residual(fit_residuals([CELL] * n, np.full(n, 0.2)), "H100-SXM-80", JOB, grid_of(CONFIG))
        for n in (50, 3, 2)
    )

    assert many[0] > few[0] > 0 == two[0]


def test_what_is_far_or_on_another_device_is_left_alone():
    """Layers four times as large, or on another device, keep the formula's time."""
    residuals = fit_residuals([CELL] * 50, np.full(50, 0.2))

    assert abs(layer_residual(residuals, "H100-SXM-80", JOB, grid_of(ParallelConfig(tp=4, dp=2, mbs=8)))[0]) < 0.001
    assert layer_residual(residuals, "A100-SXM-80", JOB, grid_of(CONFIG))[0] == 0


def test_residuals_scale_the_whole_step():
    """A profile's residual multiplies every part of the step alike."""
    plain = find_runtime("megatron-core")
    corrected = replace(plain, residuals=fit_residuals([CELL] * 50, np.full(50, 0.2)))
    cluster = find_cluster("dgx-h100")

    before, after = (
        estimate_step(setting_for(JOB, cluster, runtime), grid_of(CONFIG)) for runtime in (plain, corrected)
    )

    ratio = after.step_time_s[0] / before.step_time_s[0]
    assert ratio == pytest.approx(np.exp(0.2), rel=0.04)
    for part, seconds in before.breakdown_s.items():
        assert after.breakdown_s[part] == pytest.approx(ratio * seconds)
