from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from costmodels.blocks.operator import OpKind
from costmodels.job.parallel_config import ParallelConfig
from costmodels.step.executions import collective_executions
from costmodels.step.memory.peak import stage_memory
from costmodels.step.stage_figures import stage_figures
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import cases, job_of, setting_for

HOSTS = find_cluster("dgx-h100", hosts=4)


@given(cases(max_configs=1))
def test_stages_together_send_what_the_pipeline_sends(case):
    """Bytes times messages of every call site and phase, summed over the stages, are those of the whole pipeline."""
    grid = case.grid.take(np.array([0]))
    balanced = replace(case.setting, runtime=replace(case.setting.runtime, expert_imbalance=0.0))
    whole: Counter[tuple[str, str]] = Counter()
    for collective, phase, count in collective_executions(balanced, grid):
        sent = np.sum(count.reshape(-1) * collective.wire_bytes.reshape(-1) * collective.network_efficiency)
        whole[collective.name, phase] += float(sent)
    stages: Counter[tuple[str, str]] = Counter()
    for own in stage_figures(case.setting, grid.config(0)).collectives:
        for one in own:
            stages[one.name, one.phase] += one.size_bytes * one.count

    assert stages == pytest.approx({key: sent for key, sent in whole.items() if sent}, rel=1e-3)


def test_groups_are_the_ranks_of_megatron():
    """Of pp=2, tp=2, cp=2, dp=4 on 32 ranks: tp neighbours, cp in steps of 2, weights over cp and dp, next stage."""
    config = ParallelConfig(pp=2, tp=2, cp=2, dp=4, mbs=1)
    first, last = stage_figures(setting_for(job_of(), HOSTS), config).collectives
    ranks = {one.name: one.ranks for one in first}

    assert ranks["tp.all_gather"] == (0, 1)
    assert ranks["cp.send_recv"] == (0, 2)
    assert ranks["weights.all_gather"] == tuple(range(0, 16, 2))
    assert ranks["pp.send_recv"] == (0, 16)
    assert {one.name: one.ranks for one in last}["weights.all_gather"] == tuple(range(16, 32, 2))
    assert {one.name: one.ranks for one in last}["pp.send_recv"] == (16, 0)


def test_buckets_are_messages_of_their_own():
    """A layer of Llama 3 8B fills three buckets of 40 million parameters, and each table one; later stages have one."""
    job = job_of(num_layers=8)
    (whole,) = stage_figures(
        setting_for(job, find_cluster("dgx-h100", hosts=1)), ParallelConfig(dp=8, mbs=1)
    ).collectives
    first, last = stage_figures(
        setting_for(job, find_cluster("dgx-h100", hosts=1)), ParallelConfig(pp=2, dp=4)
    ).collectives

    def messages(own):
        return {one.name: one.count for one in own if one.kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)}

    # fc2 (59 million), fc1 (117), and the projections of attention (17 and 25) together
    assert messages(whole) == pytest.approx(
        {"weights.all_gather": 8 * 3 + 2, "weights.reduce_scatter": 8 * 3 + 2}, abs=2
    )
    assert messages(first) == pytest.approx(
        {"weights.all_gather": 4 * 3 + 1, "weights.reduce_scatter": 4 * 3 + 1}, abs=1
    )
    assert messages(last) == {"weights.all_gather": 1, "weights.reduce_scatter": 1}


def test_memory_is_that_of_every_stage():
    """The peaks are those of `stage_memory`, and passes of stages with the head take longer."""
    setting, config = setting_for(job_of(), HOSTS), ParallelConfig(pp=4, tp=2, dp=4, mbs=1)
    found = stage_figures(setting, config)

    assert found.memory.peak_bytes.tolist() == stage_memory(setting, config).peak_bytes.tolist()
    assert found.forward_s[3] > found.forward_s[1] == found.forward_s[2] > 0
    assert (found.backward_s > found.forward_s).all()
