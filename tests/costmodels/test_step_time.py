from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.kernels import roofline_s
from costmodels.parallel import ParallelConfig
from costmodels.runtime import find_runtime
from costmodels.step_time import BREAKDOWN, estimate_step, model_flops_utilisation
from hardware.cluster import cluster_from_mapping, find_cluster
from hardware.collectives import send_recv_s
from tests.costmodels.random_settings import cases, grid_of, job_of

MEGATRON = find_runtime("megatron-core")
HOST = find_cluster("dgx-h100")
HOSTS = find_cluster("dgx-h100", hosts=4)


def estimate(job, cluster, *configs, runtime=MEGATRON):
    """The estimate of a few configurations."""
    return estimate_step(job, cluster, runtime, grid_of(*configs))


# Claims about every estimate


@settings(max_examples=200, deadline=None)
@given(cases())
def test_parts_sum_to_the_step(case):
    """Every part is finite and not negative, all of them sum to the step, and compute is never free."""
    found = estimate_step(case.job, case.cluster, case.runtime, case.grid)

    assert tuple(found.breakdown_s) == BREAKDOWN
    assert all(np.all(np.isfinite(part)) and np.all(part >= 0) for part in found.breakdown_s.values())
    assert found.step_time_s == pytest.approx(np.sum(list(found.breakdown_s.values()), axis=0), rel=1e-12)
    assert np.all(found.breakdown_s["compute"] > 0)
    for part, degree in (("tp", "tp"), ("cp", "cp"), ("up", "up"), ("ep", "ep"), ("pp", "pp"), ("bubble", "pp")):
        assert np.all(found.breakdown_s[part][getattr(case.grid, degree) == 1] == 0)
    replicas = case.grid.dp * case.grid.cp * case.grid.up
    assert np.all(found.breakdown_s["dp"][replicas == 1] == 0)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_grid_is_estimated_as_each_of_its_rows(case):
    """Candidates do not influence each other: one call for all equals one call each."""
    together = estimate_step(case.job, case.cluster, case.runtime, case.grid)

    for position in range(len(case.grid)):
        alone = estimate_step(case.job, case.cluster, case.runtime, grid_of(case.grid.config(position)))
        for part in BREAKDOWN:
            assert alone.breakdown_s[part][0] == pytest.approx(together.breakdown_s[part][position], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_step_beats_the_hardware(case):
    """MFU stays below one: the model's products alone keep the devices busy for longer than that."""
    found = estimate_step(case.job, case.cluster, case.runtime, case.grid)

    utilisation = model_flops_utilisation(case.job, case.cluster, found.step_time_s)

    # causal attention counts twice its work in MFU, and 6 of the 3.5 * 2 units per score: see test_operators.py
    assert np.all(utilisation < 6 / 3.5 * max(case.runtime.matmul_efficiency, case.runtime.attention_efficiency))
    assert np.all(utilisation > 0)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_slower_kernels_never_make_a_step_faster(case):
    """Twice the time of every kernel lengthens the step, and at most doubles it.

    Left out are steps that wait for the host, and those with a ring: there longer kernels hide traffic twice.
    """
    runtime = replace(case.runtime, launch_s=0.0, collective_launch_s=0.0)
    found = estimate_step(case.job, case.cluster, runtime, case.grid)
    slowed = estimate_step(
        case.job,
        case.cluster,
        runtime,
        case.grid,
        kernel_time=lambda operator, device, job, runtime: 2 * roofline_s(operator, device, job, runtime),
    )

    no_ring = case.grid.cp == 1
    assert np.all((slowed.step_time_s >= found.step_time_s * (1 - 1e-12))[no_ring])
    assert np.all(slowed.step_time_s <= 2 * found.step_time_s * (1 + 1e-12))


# Pipelines


@pytest.mark.parametrize("vpp", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_equal_stages_have_narayanans_bubble(pp, vpp):
    """With nothing but equal layers the bubble is (p-1)/(m v) of the compute (Narayanan et al. 2021, section 2.2)."""
    job = job_of("llama3-8b", batch=64, vocab_size=1)
    runtime = replace(MEGATRON, launch_s=0.0, collective_launch_s=0.0)
    config = ParallelConfig(pp=pp, dp=8 // pp, vpp=vpp)
    num_micro_batches = 64 // config.dp

    found = estimate(job, HOST, config, runtime=runtime).breakdown_s

    assert found["bubble"][0] / found["compute"][0] == pytest.approx((pp - 1) / (num_micro_batches * vpp), rel=5e-3)


def test_slowest_stage_sets_the_pace():
    """A large vocabulary makes the last stage slow: the step's compute is that stage's, the rest is bubble."""
    job = job_of("llama3-8b", batch=64, vocab_size=2_000_000)

    small = estimate(job_of("llama3-8b", batch=64, vocab_size=1), HOST, ParallelConfig(pp=8))
    large = estimate(job, HOST, ParallelConfig(pp=8))

    assert large.breakdown_s["compute"][0] > 2 * small.breakdown_s["compute"][0]
    assert large.breakdown_s["bubble"][0] == pytest.approx(small.breakdown_s["bubble"][0], rel=0.05)


def test_more_micro_batches_make_the_bubble_a_smaller_share():
    """The bubble is paid once per step, however many micro-batches it has."""
    few, many = (estimate(job_of(batch=batch), HOST, ParallelConfig(pp=8)) for batch in (8, 64))

    assert many.breakdown_s["bubble"][0] == pytest.approx(few.breakdown_s["bubble"][0])
    assert many.breakdown_s["compute"][0] == pytest.approx(8 * few.breakdown_s["compute"][0])


# Where the groups stand


def test_tensor_parallelism_across_hosts_is_slower():
    """A tp of 16 on hosts of 8 pays more for tp than tp 8, and more than tp 16 on one large NVLink domain."""
    found = estimate(job_of(), HOSTS, ParallelConfig(tp=8, dp=4), ParallelConfig(tp=16, dp=2))
    domain = cluster_from_mapping({"device": "H100-SXM-80", "hosts": 2, "devices_per_host": 16}, Path())
    inside = estimate(job_of(), domain, ParallelConfig(tp=16, dp=2))

    # tp 16 has half the replicas and so twice the micro-batches
    assert found.breakdown_s["tp"][1] > 2 * found.breakdown_s["tp"][0]
    assert found.step_time_s[1] > found.step_time_s[0]
    assert found.breakdown_s["tp"][1] > inside.breakdown_s["tp"][0]


def test_more_replicas_share_the_batch():
    """Twice the data parallel ranks have half the compute per step, and never less than none of the reduction."""
    job = job_of(batch=256)
    previous = np.inf
    for hosts in (1, 2, 4, 8):
        found = estimate(job, find_cluster("dgx-h100", hosts=hosts), ParallelConfig(tp=8, dp=hosts))
        compute_s = float(found.breakdown_s["compute"][0])
        assert compute_s == pytest.approx(previous / 2) or hosts == 1
        assert (found.breakdown_s["dp"][0] > 0) == (hosts > 1)
        previous = compute_s


@pytest.mark.parametrize(("first", "second"), [("dgx-a100", "dgx-h100"), ("dgx-h100", "dgx-a100")])
def test_the_slower_of_two_host_groups_decides(first, second):
    """Half A100, half H100 computes a step no faster than A100 alone, whichever comes first."""
    mixed = cluster_from_mapping({"groups": [{"name": first}, {"name": second}]}, Path())
    slow, fast = (find_cluster(name, hosts=2) for name in ("dgx-a100", "dgx-h100"))
    job = job_of("llama3-8b", batch=64, vocab_size=1)
    for config in (ParallelConfig(tp=8, dp=2), ParallelConfig(dp=16), ParallelConfig(pp=2, tp=8)):
        compute_s = {
            name: float(estimate(job, cluster, config).breakdown_s["compute"][0])
            for name, cluster in (("mixed", mixed), ("slow", slow), ("fast", fast))
        }
        assert compute_s["mixed"] == pytest.approx(compute_s["slow"], rel=1e-3)
        assert compute_s["fast"] < compute_s["slow"]


def test_stages_on_unlike_hosts_have_unlike_times():
    """With pp over the groups the fast stage waits: the bubble is the fast stage's time, less than the slow one's."""
    mixed = cluster_from_mapping({"groups": [{"name": "dgx-a100"}, {"name": "dgx-h100"}]}, Path())
    job = job_of("llama3-8b", batch=64, vocab_size=1)
    config = ParallelConfig(pp=2, tp=8)

    found = estimate(job, mixed, config, runtime=replace(MEGATRON, launch_s=0.0, collective_launch_s=0.0))
    slow = estimate(
        job,
        find_cluster("dgx-a100", hosts=2),
        config,
        runtime=replace(MEGATRON, launch_s=0.0, collective_launch_s=0.0),
    )

    assert found.breakdown_s["bubble"][0] < 0.7 * slow.breakdown_s["bubble"][0]


# Recomputation, experts, latent attention, ZeRO


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_recomputation_costs_compute(name):
    """Full repeats the forward pass of the layers, about a third more; selective repeats the attention core."""
    none, selective, full = estimate(
        job_of(name), HOST, *(ParallelConfig(dp=8, recompute=mode) for mode in ("none", "selective", "full"))
    ).breakdown_s["compute"]

    assert none < selective < full
    assert 1.2 < full / none < 1.4


def test_experts_spread_over_hosts_pay_for_it():
    """An ep over one host costs all-to-all time, one over hosts more, none of them nothing; compute hardly changes."""
    job = job_of("mixtral-8x7b")
    found = estimate(job, find_cluster("dgx-h100", hosts=2), *(ParallelConfig(tp=2, dp=8, ep=ep) for ep in (1, 4, 8)))

    ep_s = found.breakdown_s["ep"]
    assert ep_s[0] == 0 < ep_s[1] < ep_s[2]
    assert found.breakdown_s["compute"] == pytest.approx(found.breakdown_s["compute"][0], rel=0.05)


def test_latent_attention_and_shared_experts_have_a_price():
    """DeepSeek-V3, with MLA, 256 experts and 3 dense layers, on 2,048 H800-like devices: a step of its paper's order.

    Its report trains 14.8T tokens in 2.664 million H800 hours, 5,556 tokens per GPU and second per 3.6e3 s: 15,360
    sequences of 4,096 tokens take 19.9 s on 2,048 devices. fp8 and DualPipe are its own; a factor of two is allowed.
    """
    job = replace(job_of("deepseek-v3", batch=15360), precision="fp8")
    config = ParallelConfig(pp=16, dp=128, ep=64)

    found = estimate(job, find_cluster("dgx-h100", hosts=256), config)

    assert 19.9 / 2 < found.step_time_s[0] < 19.9 * 2
    assert found.breakdown_s["ep"][0] > 0


def test_zero_stages_trade_memory_for_traffic():
    """Stage 1 divides the optimizer's time; where nothing is hidden, stage 3 gathers for every micro-batch."""
    job = job_of(batch=256)
    runtime = replace(MEGATRON, overlaps_gradients=False, overlaps_weight_gather=False)
    found = estimate(job, HOSTS, *(ParallelConfig(dp=32, zero_stage=stage) for stage in range(4)), runtime=runtime)

    optimizer_s, dp_s = found.breakdown_s["optimizer"], found.breakdown_s["dp"]
    assert optimizer_s[1:] == pytest.approx(optimizer_s[0] / 32)
    assert dp_s[1] == dp_s[2]
    assert dp_s[3] > 4 * dp_s[2]


def test_gradients_hide_behind_the_backward_pass():
    """A runtime that overlaps exposes less of the reduction than one that does not, and never less than one bucket."""
    job = job_of(batch=256)
    config = ParallelConfig(dp=32, zero_stage=0)
    exposed = [
        float(estimate(job, HOSTS, config, runtime=replace(MEGATRON, overlaps_gradients=overlaps)).breakdown_s["dp"][0])
        for overlaps in (True, False)
    ]

    assert exposed[1] / 32 <= exposed[0] < exposed[1]


def test_small_work_waits_for_the_host():
    """Tiny layers are launch-bound: the step grows with the launch time, and large ones do not notice it."""
    tiny = job_of("llama3-8b", sequence_length=128, batch=8, hidden_size=256, ffn_size=512, head_dim=8, vocab_size=64)
    large = job_of("llama3-70b", batch=8)
    slow = replace(MEGATRON, launch_s=100e-6)

    assert estimate(tiny, HOST, ParallelConfig(dp=8)).breakdown_s["host"][0] > 0
    assert (
        estimate(tiny, HOST, ParallelConfig(dp=8), runtime=slow).step_time_s[0]
        > 5 * estimate(tiny, HOST, ParallelConfig(dp=8)).step_time_s[0]
    )
    assert estimate(large, HOST, ParallelConfig(dp=8)).breakdown_s["host"][0] == 0


def test_a_short_message_still_takes_a_hop():
    """Plain 1F1B exposes every transfer; interleaving exposes the filling ones, and of the others the latency."""
    job = job_of()
    plain, interleaved = estimate(job, HOST, ParallelConfig(pp=8), ParallelConfig(pp=8, vpp=4)).breakdown_s["pp"]
    latency_s = send_recv_s(0.0, HOST.group_links(np.array([1]), np.array([8])))[0]

    hop_s = plain / (2 * (64 + 8 - 1))
    assert interleaved == pytest.approx(2 * (hop_s * (8 - 1) + latency_s * 64 * 4))


def test_mfu_is_model_flops_over_peak():
    """6 N + 12 L h s per token over what the devices could do: 8 H100 at 989 TFLOP/s."""
    job = job_of("llama3-8b")
    flop = 64 * 4096 * job.model.model_flops_per_token(4096)

    utilisation = model_flops_utilisation(job, HOST, np.array([2.0]))

    assert utilisation[0] == pytest.approx(flop / (2.0 * 8 * HOST.devices[0].peak_flop_per_s("bf16")))
