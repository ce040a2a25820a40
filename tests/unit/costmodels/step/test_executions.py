from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.uneven_work import Assignment
from costmodels.operators.kernels import collective_s
from costmodels.step.executions import collective_executions, operator_executions
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import cases, grid_of, job_of, setting_for

MEGATRON = find_runtime("megatron-core")
HOSTS = find_cluster("dgx-h100", hosts=4)
JOB = job_of(batch=64)


def without_overlap(runtime):
    """The runtime, all of whose traffic is exposed."""
    hides = [name for name in runtime.__dataclass_fields__ if name.startswith("overlaps_")]
    return replace(runtime, **dict.fromkeys(hides, False), residuals=())


def counted(job, cluster, config, runtime=MEGATRON):
    """Executions of each collective by name and phase."""
    return {
        (collective.name, phase): float(count.sum())
        for collective, phase, count in collective_executions(setting_for(job, cluster, runtime), grid_of(config))
    }


@given(cases())
def test_collectives_sum_to_their_parts_of_the_step(case):
    """On one stage and without overlap, the collectives' executions together take the step's tp, cp, up, ep and dp.

    On hosts of one kind: where they are unlike, a step waits for the slowest device, which may have the better links.
    """
    at = np.flatnonzero(case.grid.pp == 1)
    assume(len(at) and len(case.cluster.groups) == 1)
    grid, runtime = case.grid.take(at[:1]), without_overlap(case.runtime)
    step = estimate_step(replace(case.setting, runtime=runtime), grid).breakdown_s

    found = dict.fromkeys(("tp", "cp", "up", "ep", "dp"), 0.0)
    for collective, _, count in collective_executions(replace(case.setting, runtime=runtime), grid):
        dimension = collective.name.split(".")[0]
        part = {"expert_tp": "tp"}.get(dimension, dimension)
        found[part if part in found else "dp"] += float((collective_s(collective) * count).sum())

    assert found == pytest.approx({part: step[part][0] for part in found}, rel=1e-9)


def test_stages_share_the_layers():
    """A pipeline's stages together execute each layer's operators once per micro-batch, and again if recomputed."""
    for recompute, forward in (("none", 1), ("full", 2)):
        config = ParallelConfig(pp=4, tp=2, dp=4, mbs=2, recompute=recompute)
        counts = {operator.name: count[0] for operator, count in operator_executions(JOB, MEGATRON, grid_of(config))}

        assert counts["attention.qkv"] == 32 * 8 * forward
        assert counts["attention.qkv.weight_gradient"] == 32 * 8
        assert counts["head.logits"] == 8


def test_layers_that_an_assignment_recomputes_run_again():
    """Of 8 layers 3 run again in full, with their collectives; the rest recomputes what the configuration says."""
    job = job_of("llama3-8b", batch=64, num_layers=8)
    some = Assignment(layers=(5, 3), recomputed=(2, 1))
    config = ParallelConfig(pp=2, tp=2, dp=8, mbs=2, recompute="selective", assignment=some)
    forward = {
        operator.name: count[0] / 4
        for operator, count in operator_executions(job, MEGATRON, grid_of(config))
        if operator.phase is Phase.FORWARD
    }

    assert (forward["attention.qkv"], forward["attention.core"], forward["head.logits"]) == (8 + 3, 8 + 8, 1)
    scatters = counted(job, HOSTS, config)["tp.reduce_scatter", Phase.FORWARD]
    assert scatters / 4 == 2 * (8 + 3) + 1


def test_hops_are_those_between_stages():
    """Each micro-batch passes every boundary between model chunks forward and back; the message is one micro-batch."""
    config = ParallelConfig(pp=4, vpp=2, tp=1, dp=8, mbs=2)

    hops = [
        (collective, phase, count)
        for collective, phase, count in collective_executions(setting_for(JOB, HOSTS), grid_of(config))
        if collective.name == "pp.send_recv"
    ]

    assert [(phase, count[0]) for _, phase, count in hops] == [(Phase.FORWARD, 7 * 4), (Phase.BACKWARD, 7 * 4)]
    assert hops[0][0].kind is OpKind.SEND_RECV
    assert hops[0][0].shape[0].tolist() == [2 * 2 * 4096 * 4096, 4, 4]


@pytest.mark.parametrize(("zero_stage", "gathers", "scatters"), [(1, 1, 1), (3, 2 * 4, 4)])
def test_a_zero_stage_says_how_often_weights_travel(zero_stage, gathers, scatters):
    """ZeRO 1 gathers weights and scatters gradients once per step, ZeRO 3 in each micro-batch's passes."""
    counts = counted(JOB, HOSTS, ParallelConfig(tp=2, dp=16, mbs=1, zero_stage=zero_stage))

    assert (
        counts["weights.all_gather", Phase.FORWARD] + counts.get(("weights.all_gather", Phase.BACKWARD), 0) == gathers
    )
    assert counts["weights.reduce_scatter", Phase.BACKWARD] == scatters


def test_zero_2_may_reduce_every_micro_batch():
    """Then gradients travel as often as under ZeRO 3, weights as under ZeRO 1, and the step takes longer."""
    config = ParallelConfig(tp=2, dp=16, mbs=1, zero_stage=2)
    runtime = replace(MEGATRON, reduces_each_micro_batch=True)
    counts = counted(JOB, HOSTS, config, runtime)

    assert counts["weights.reduce_scatter", Phase.BACKWARD] == 4
    assert counts["weights.all_gather", Phase.FORWARD] == 1
    once_s, each_s = (
        estimate_step(setting_for(JOB, HOSTS, without_overlap(own)), grid_of(config)).breakdown_s["dp"][0]
        for own in (MEGATRON, runtime)
    )
    assert once_s < each_s < 4 * once_s


def test_one_device_calls_no_collective():
    """Groups of one rank communicate nothing."""
    cluster = replace(HOSTS, groups=(replace(HOSTS.groups[0], hosts=1, devices_per_host=1),))

    assert counted(job_of("llama3-8b"), cluster, ParallelConfig()) == {}
