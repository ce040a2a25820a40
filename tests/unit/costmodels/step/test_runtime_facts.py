"""What each fact of a runtime profile does to a prediction."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernels import MISALIGNED_TIME, alone_s
from costmodels.operators.layer_operators import step_operators
from costmodels.step.executions import collective_executions
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from hardware.device import find_device
from tests.support.settings.random_settings import grid_of, job_of, setting_for

MEGATRON = find_runtime("megatron-core")
HOSTS = find_cluster("dgx-a100", hosts=4)
JOB = job_of(batch=256)
PIPELINE = ParallelConfig(pp=4, tp=4, dp=2, mbs=1)


def step_s(runtime, config=PIPELINE, job=JOB, cluster=HOSTS):
    """The predicted step time of one configuration."""
    return float(estimate_step(setting_for(job, cluster, runtime), grid_of(config)).step_time_s[0])


def memory(runtime, *configs, job=JOB, cluster=HOSTS):
    """The predicted memory of some configurations."""
    return estimate_memory(setting_for(job, cluster, runtime), grid_of(*configs))


def test_a_captured_graph_never_waits_for_the_host():
    """Slow launches cost nothing once the whole step is captured."""
    slow = replace(MEGATRON, launch_s=3e-4)
    captured = replace(slow, captured_graph=True)

    assert estimate_step(setting_for(JOB, HOSTS, captured), grid_of(PIPELINE)).breakdown_s["host"][0] == 0
    assert step_s(captured) < step_s(slow)


def test_pending_transfers_slow_tensor_parallelism_between_hosts_only():
    """What a pending transfer adds counts where a pipeline crosses hosts and tp splits layers, and nowhere else."""
    patient = replace(MEGATRON, pending_transfer_s=2e-3)

    assert step_s(patient) > 1.2 * step_s(MEGATRON)
    for config in (ParallelConfig(tp=4, dp=8, mbs=1), ParallelConfig(pp=4, dp=8, mbs=1)):
        assert step_s(patient, config) == pytest.approx(step_s(MEGATRON, config))


def test_a_scattered_transfer_sends_a_share():
    """Without sequence parallelism, tp ranks that send a share each hand on faster than ranks that send it all.

    Ranks that send shares forward and all of the gradients back save while the pipeline fills: afterwards a stage waits
    for the longer of both messages, which pass each other.
    """
    config = replace(PIPELINE, sequence_parallel=False)
    whole, forward, both = (replace(MEGATRON, scatters_p2p=scatters) for scatters in (False, "activations", True))

    assert step_s(both, config) < step_s(forward, config) < step_s(whole, config)
    saved = [step_s(whole, config) - step_s(one, config) for one in (forward, both)]
    assert saved[0] < saved[1] / 2
    assert step_s(both) == step_s(whole)


def test_inputs_kept_as_gathered_need_more_memory():
    """Two per layer stand whole where they were split over tp; without sequence parallelism nothing changes."""
    split, whole = (replace(PIPELINE, sequence_parallel=parallel) for parallel in (True, False))
    again, kept = (
        memory(replace(MEGATRON, gathers_inputs_again=gathers), split, whole).parts_bytes["activations"]
        for gathers in (True, False)
    )

    # 8 layers of the first stage for 4 micro-batches in flight, 3 of 4 parts of two inputs in 16 bits
    assert kept[0] - again[0] == pytest.approx(4 * 8 * 2 * 2 * 4096 * 4096 * 3 / 4, rel=0.1)
    assert kept[1] == again[1]


def test_tied_gradients_may_be_added_up_as_shards():
    """The ends of a pipeline send 1/dp of the table's gradients, but whole ones where nothing is sharded."""
    job = job_of(batch=256, tied_embeddings=True)
    sent = {
        (shards, zero_stage): sum(
            float((count * collective.wire_bytes).sum())
            for collective, _, count in collective_executions(
                setting_for(job, HOSTS, replace(MEGATRON, shards_tied_gradients=shards)),
                grid_of(replace(PIPELINE, zero_stage=zero_stage)),
            )
            if collective.name == "tied.all_reduce"
        )
        for shards in (True, False)
        for zero_stage in (0, 1)
    }

    assert sent[True, 1] == pytest.approx(sent[False, 1] / 2)
    assert sent[True, 0] == sent[False, 0] == sent[False, 1] > 0


def test_gradients_kept_as_shards_need_less_memory():
    """A runtime that keeps gradients only as shards under ZeRO 1 keeps 1/dp of them."""
    whole, sharded = (
        memory(replace(MEGATRON, shards_gradients=shards), ParallelConfig(dp=32, mbs=1, zero_stage=1)).parts_bytes
        for shards in (False, True)
    )

    assert sharded["gradients"][0] == pytest.approx(whole["gradients"][0] / 32)
    assert sharded["weights"][0] == whole["weights"][0]


def test_dropout_passes_over_the_scores_once_more():
    """Attention dropout costs time and memory where scores pass through memory, and nothing in a flash kernel."""
    config = ParallelConfig(tp=4, dp=8, mbs=1)
    for runtime, costs in ((replace(MEGATRON, fused_attention=False), True), (MEGATRON, False)):
        dropping = replace(runtime, attention_dropout=True)
        slower = step_s(dropping, config) > step_s(runtime, config)
        larger = memory(dropping, config).peak_bytes[0] > memory(runtime, config).peak_bytes[0]
        assert (slower, larger) == (costs, costs)


def test_an_odd_vocabulary_is_slow_unless_it_is_padded():
    """An output head of 50,257 columns takes about 2.7 times as long as one that the runtime pads to 50,304."""
    job = job_of("gpt-13b", vocab_size=50257)
    device = find_device("A100-SXM-80")

    def logits_s(runtime):
        operators = step_operators(job, runtime, grid_of(ParallelConfig()))
        return float(alone_s(next(op for op in operators if op.name == "head.logits"), device)[0])

    padded, odd = logits_s(MEGATRON), logits_s(replace(MEGATRON, pads_whole_vocabulary=False))
    assert odd / padded == pytest.approx(MISALIGNED_TIME, rel=0.1)


def test_fp4_multiplies_faster_than_fp8_and_both_faster_than_bf16():
    """On Blackwell a narrower type makes the step shorter and keeps less of the products' inputs."""
    cluster, config = find_cluster("gb200-nvl72"), ParallelConfig(tp=2, dp=36, mbs=1)
    jobs = [replace(job_of("llama3-70b", batch=72), precision=precision) for precision in ("bf16", "fp8", "nvfp4")]

    times = [step_s(MEGATRON, config, job, cluster) for job in jobs]
    kept = [memory(MEGATRON, config, job=job, cluster=cluster).parts_bytes["activations"][0] for job in jobs]

    assert np.all(np.diff(times) < 0)
    assert kept == sorted(kept, reverse=True)


def test_a_mask_travels_forward_alone():
    """With the mask of one sequence each micro-batch takes longer forward, the same for any micro-batch size."""
    masked = replace(MEGATRON, sends_mask=True)
    configs = [replace(PIPELINE, sequence_parallel=False, mbs=mbs) for mbs in (1, 2)]
    more_s = [(step_s(masked, config) - step_s(MEGATRON, config)) * config.mbs for config in configs]

    assert more_s[0] > 0
    assert more_s[1] < 1.5 * more_s[0]
