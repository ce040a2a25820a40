from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_prior
from costmodels.step.memory.peak import estimate_memory
from costmodels.surrogates.joint_errors import draw_log_errors, error_sources
from costmodels.surrogates.uncertainty import step_uncertainty
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import grid_of, job_of, setting_for

JOB = job_of()
CONFIGS = {
    ("dgx-h100", 2): ParallelConfig(tp=2, dp=8, mbs=2),
    ("dgx-h100", 4): ParallelConfig(tp=2, pp=2, dp=8, mbs=2),
    ("dgx-a100", 2): ParallelConfig(tp=4, pp=2, dp=2, mbs=2),
}
DRAWS = 40_000


def sources(runtime):
    """What the errors of three predictions depend on: two sizes of one cluster, and another cluster."""
    return [
        error_sources(setting_for(JOB, find_cluster(name, hosts=hosts), runtime), config)
        for (name, hosts), config in CONFIGS.items()
    ]


@pytest.mark.parametrize("knows_cluster", [False, True])
def test_each_prediction_errs_as_it_does_alone(knows_cluster):
    """The intervals are those of `step_uncertainty`, and 95% of the joint draws lie in each."""
    runtime = replace(find_prior("megatron-core"), knows_cluster=knows_cluster, step_error=0.07)
    found = sources(runtime)

    drawn = draw_log_errors(found, DRAWS, np.random.default_rng(0))

    for at, ((name, hosts), config) in enumerate(CONFIGS.items()):
        setting, grid = setting_for(JOB, find_cluster(name, hosts=hosts), runtime), grid_of(config)
        alone = step_uncertainty(setting, grid, memory=estimate_memory(setting, grid))
        assert found[at].log_error_95 == pytest.approx(alone.log_error_95[0])
        assert np.mean(np.abs(drawn[:, at]) <= alone.log_error_95[0]) == pytest.approx(0.95, abs=0.01)


def test_sizes_of_one_cluster_err_more_alike_than_clusters():
    """Two sizes of one cluster share what is unknown of the cluster, so that their errors correlate more."""
    drawn = np.clip(draw_log_errors(sources(find_prior("megatron-core")), DRAWS, np.random.default_rng(0)), -1, 1)

    same, other = np.corrcoef(drawn.T)[0, 1:]

    assert same > other
    assert same > 0.5
