import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.simulator.simulated_step import simulate_step
from costmodels.simulator.stage_rows import idle_gaps, stage_rows
from costmodels.simulator.step_tasks import Role
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import job_of, setting_for

CASES = (
    (ParallelConfig(pp=4, tp=2, dp=2), "megatron-core"),
    (ParallelConfig(pp=4, tp=2, dp=2, vpp=2), "megatron-core"),
    (ParallelConfig(pp=4, tp=2, dp=2, vpp=2), "nanotron"),
    (ParallelConfig(pp=1, tp=2, dp=8), "nanotron"),
    (ParallelConfig(pp=2, tp=4, dp=2, zero_stage=3), "torchtitan"),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def simulation(request):
    """A configuration, and a step of it under some runtime."""
    config, runtime = request.param
    job, cluster = job_of(batch=32), find_cluster("dgx-h100", hosts=2)
    return config, simulate_step(setting_for(job, cluster, find_runtime(runtime)), config)


def test_a_stage_computes_one_thing_after_the_other(simulation):
    """Passes of one stage follow each other and end within the step."""
    _, step = simulation

    for row in stage_rows(step):
        starts, ends = (np.array([getattr(span, side) for span in row.computing]) for side in ("start_s", "end_s"))
        assert (starts[1:] >= ends[:-1] - 1e-9).all()
        assert starts[0] >= 0
        assert ends[-1] <= step.timeline.makespan_s + 1e-9


def test_gaps_are_the_idle_share(simulation):
    """What lies between the passes of a stage adds up to the share of the step in which it is idle."""
    _, step = simulation
    until_s = step.timeline.makespan_s

    for row in stage_rows(step):
        idle_s = sum(end_s - start_s for start_s, end_s in idle_gaps(row, until_s))
        assert idle_s == pytest.approx(row.idle_share * until_s, abs=1e-9)


def test_every_stage_has_every_micro_batch(simulation):
    """Each stage runs each micro-batch forward and backward through each of its chunks, and hands it on."""
    config, step = simulation
    micro_batches = range(32 // (config.dp * config.mbs))
    rows = stage_rows(step)

    assert [row.stage for row in rows] == list(range(config.pp))
    for row in rows:
        found = {(span.kind, span.micro_batch, span.chunk) for span in row.computing if span.role == Role.PASS}
        assert found == {(kind, m, chunk) for kind in (0, 1) for m in micro_batches for chunk in range(config.vpp)}
        assert bool(row.hops) == (config.pp > 1)


def test_a_stage_without_layers_is_idle():
    """A runtime that balances stages may leave one empty: it has no passes, and idles all the step."""
    setting = setting_for(job_of(batch=8), find_cluster("p5-h100", hosts=16), find_runtime("nanotron"))
    rows = stage_rows(simulate_step(setting, ParallelConfig(pp=32, tp=2, dp=2)))

    empty = [row for row in rows if not any(span.role == Role.PASS for span in row.computing)]
    assert empty
    assert all(row.idle_share > 0.99 for row in empty)
