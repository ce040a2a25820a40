import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import Role, simulate_step
from costmodels.simulator.stage_rows import idle_gaps, stage_rows
from hardware.cluster import find_cluster

CONFIGS = (
    ParallelConfig(pp=4, tp=2, dp=2),
    ParallelConfig(pp=4, tp=2, dp=2, vpp=2),
    ParallelConfig(pp=1, tp=2, dp=8),
    ParallelConfig(pp=2, tp=4, dp=2, zero_stage=3),
)
RUNTIMES = ("megatron-core", "nanotron", "torchtitan")


@pytest.fixture(scope="module", params=[(c, r) for c in CONFIGS for r in RUNTIMES], ids=lambda p: f"{p[1]}-{p[0]}")
def simulation(request):
    """A step of each configuration under each runtime, with its number of chunks and micro-batches."""
    config, runtime = request.param
    job = TrainingJob(model=find_model("llama3-8b"), sequence_length=4096, global_batch_size=32)
    return config, simulate_step(
        Setting(job=job, cluster=find_cluster("dgx-h100", hosts=2), runtime=find_runtime(runtime)), config
    )


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
    job = TrainingJob(model=find_model("llama3-8b"), sequence_length=4096, global_batch_size=8)
    config = ParallelConfig(pp=32, tp=2, dp=2)
    rows = stage_rows(
        simulate_step(
            Setting(job=job, cluster=find_cluster("p5-h100", hosts=16), runtime=find_runtime("nanotron")), config
        )
    )

    empty = [row for row in rows if not any(span.role == Role.PASS for span in row.computing)]
    assert empty
    assert all(row.idle_share > 0.99 for row in empty)
