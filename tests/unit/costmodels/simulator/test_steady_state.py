"""The steady state of simulated pipelines: what it says about longer steps, and when it says nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from costmodels.simulator.simulated_step import price_step
from costmodels.simulator.stage_prices import price_operators
from costmodels.simulator.steady_state import repetition_s
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import job_of, setting_for

TWO_KINDS = cluster_from_mapping({"groups": [{"name": "dgx-h100"}, {"name": "dgx-a100"}]}, Path())
CLUSTERS = {"two kinds": TWO_KINDS, "PCIe": find_cluster("v100-pcie", hosts=2)}


def priced(cluster, pp, tp, vpp, layers=()):
    """A step of replicas that are alike, with its stages' layers if they are given."""
    job = job_of(num_layers=sum(layers) or 32)
    dp = cluster.num_devices // (pp * tp)
    assignment = Assignment(layers=layers)
    config = ParallelConfig(pp=pp, tp=tp, dp=dp, vpp=vpp, sequence_parallel=tp > 1, assignment=assignment)
    setting = setting_for(job, cluster)
    return price_step(setting, config, prices=price_operators(setting, [config]))


def repetition(step, micro_batches):
    """Time of the tasks of a step, the number of micro-batches of one repetition, and its time."""
    size = 1 if step.config.vpp == 1 else step.config.pp
    tasks, timeline = step.run(step.orders([micro_batches]))
    return timeline.makespan_s, size, repetition_s(tasks, timeline, size)


@given(
    cluster=st.sampled_from(sorted(CLUSTERS)),
    pp=st.sampled_from([2, 4, 8]),
    tp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2, 3]),
    rounds=st.integers(2, 5),
    more=st.integers(1, 4),
    layers=st.lists(st.integers(1, 9), min_size=24, max_size=24),
)
def test_a_longer_step_takes_whole_repetitions_longer(cluster, pp, tp, vpp, rounds, more, layers):
    """To a billionth, for unlike stages on unlike hosts and shared adapters, if the step repeats itself at all."""
    step = priced(CLUSTERS[cluster], pp, tp, vpp, tuple(layers[: pp * vpp]))
    makespan_s, size, each_s = repetition(step, rounds * pp)
    if each_s is not None:
        longer_s = step.run(step.orders([rounds * pp + more * size]))[1].makespan_s
        assert longer_s == pytest.approx(makespan_s + more * each_s, rel=1e-9)


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
@pytest.mark.parametrize(("pp", "tp", "vpp", "rounds"), [(2, 8, 1, 2), (4, 2, 1, 2), (8, 1, 1, 2), (2, 8, 2, 3)])
def test_pipelines_repeat_themselves_after_few_rounds(cluster, pp, tp, vpp, rounds):
    """After two rounds without chunks, and after three with them."""
    assert repetition(priced(CLUSTERS[cluster], pp, tp, vpp), rounds * pp)[2] is not None


@pytest.mark.parametrize(("pp", "vpp", "rounds"), [(4, 1, 1), (8, 1, 1), (4, 2, 2)])
def test_a_pipeline_that_still_fills_does_not_repeat_itself(pp, vpp, rounds):
    """While the first micro-batches have not come back, stages run forward passes only, which is not what follows."""
    assert repetition(priced(TWO_KINDS, pp, 2, vpp), rounds * pp)[2] is None
