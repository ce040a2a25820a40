from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernels import kernel_s
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.placement import place
from costmodels.step.step_time import estimate_step, model_flops_utilisation
from hardware.cluster_file import cluster_from_mapping, find_cluster
from hardware.collectives import all_gather_s, send_recv_s
from tests.support.settings.random_settings import CLUSTERS, cases, grid_of, job_of, setting_for

# what a fit left of some devices and layers would stand between these claims and the terms that they are about
MEGATRON = replace(find_runtime("megatron-core"), residuals=(), device_speed=(), step_overhead_s=0.01)
HOST = find_cluster("dgx-h100")
HOSTS = find_cluster("dgx-h100", hosts=4)


def estimate(job, cluster, *configs, runtime=MEGATRON):
    """The estimate of a few configurations."""
    return estimate_step(setting_for(job, cluster, runtime), grid_of(*configs))


# Claims about every estimate


@given(cases())
def test_parts_sum_to_the_step(case):
    """Every part is finite and not negative, all of them sum to the step, and compute is never free.

    MFU stays below one: the model's products alone keep the devices busy for longer than that.
    """
    found = estimate_step(case.setting, case.grid)

    assert tuple(found.breakdown_s) == BREAKDOWN
    assert all(np.all(np.isfinite(part)) and np.all(part >= 0) for part in found.breakdown_s.values())
    assert found.step_time_s == pytest.approx(np.sum(list(found.breakdown_s.values()), axis=0), rel=1e-12)
    assert np.all(found.breakdown_s["compute"] > 0)
    for part, degree in (("tp", "tp"), ("cp", "cp"), ("up", "up"), ("ep", "ep"), ("pp", "pp"), ("bubble", "pp")):
        assert np.all(found.breakdown_s[part][getattr(case.grid, degree) == 1] == 0)
    groups = place(case.cluster, case.grid)
    sizes = (groups.weights, groups.weight_copies, groups.expert_weights, groups.expert_copies)
    is_alone = np.all([group.size == 1 for group in sizes], axis=0)
    assert np.all(found.breakdown_s["dp"][is_alone] == 0)
    utilisation = model_flops_utilisation(case.job, case.cluster, found.step_time_s)
    # causal attention counts twice its work in MFU, and 6 of the 3.5 * 2 units per score: see test_layer_operators.py
    assert np.all(utilisation < 6 / 3.5 * max(case.runtime.matmul_efficiency, case.runtime.attention_efficiency))
    assert np.all(utilisation > 0)


@pytest.mark.slow
@settings(max_examples=30)
@given(cases())
def test_a_grid_is_estimated_as_each_of_its_rows(case):
    """Candidates do not influence each other: one call for all equals one call each."""
    together = estimate_step(case.setting, case.grid)

    for position in range(len(case.grid)):
        alone = estimate_step(case.setting, grid_of(case.grid.config(position)))
        for part in BREAKDOWN:
            # what the host adds is a small difference of long times
            rounding_s = 1e-12 * together.step_time_s[position]
            expected = pytest.approx(together.breakdown_s[part][position], rel=1e-12, abs=rounding_s)
            assert alone.breakdown_s[part][0] == expected


@settings(max_examples=40)
@given(cases())
def test_every_kernel_and_collective_may_be_corrected(case):
    """Where all that goes through `collective_time` takes no time, no communication is left.

    Twice the time of every kernel lengthens the step, and at most doubles it. Left out are steps that wait for the
    host, and those with a ring: there longer kernels hide traffic twice.
    """
    setting = replace(case.setting, runtime=replace(case.runtime, launch_s=0.0, collective_launch_s=0.0))
    found = estimate_step(setting, case.grid)
    silent = estimate_step(setting, case.grid, collective_time=lambda each: np.zeros(each.messages.shape))
    slowed = estimate_step(setting, case.grid, kernel_time=lambda *asked: 2 * kernel_s(*asked))

    for part in ("tp", "cp", "up", "ep", "dp", "pp"):
        assert np.all(silent.breakdown_s[part] == 0)
    no_ring = case.grid.cp == 1
    assert np.all((slowed.step_time_s >= found.step_time_s * (1 - 1e-12))[no_ring])
    assert np.all(slowed.step_time_s <= 2 * found.step_time_s * (1 + 1e-12))


# Pipelines


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (4, 1), (8, 4)])
def test_equal_stages_have_narayanans_bubble(pp, vpp):
    """With nothing but equal layers the bubble is (p-1)/(m v) of the compute (Narayanan et al. 2021, section 2.2)."""
    job = job_of("llama3-8b", batch=64, vocab_size=1)
    runtime = replace(MEGATRON, launch_s=0.0, collective_launch_s=0.0)
    config = ParallelConfig(pp=pp, dp=8 // pp, vpp=vpp)
    num_micro_batches = 64 // config.dp

    found = estimate(job, HOST, config, runtime=runtime).breakdown_s

    assert found["bubble"][0] / found["compute"][0] == pytest.approx((pp - 1) / (num_micro_batches * vpp), rel=5e-3)


@pytest.mark.parametrize("batch", [16, 32, 64])
def test_a_slow_first_stage_that_never_waits_has_no_bubble(batch):
    """Chunks fill the pipeline while the A100 host works on: the timed passes leave its bubble at zero, never below."""
    configs = [ParallelConfig(pp=2, tp=8, vpp=vpp) for vpp in (2, 4)]

    # long sequences, so that the devices set the pace and not their hosts
    job = job_of(batch=batch, sequence_length=16384)
    found = estimate(job, CLUSTERS["A100 and H100"], *configs, runtime=find_runtime("megatron-core"))

    assert (found.breakdown_s["bubble"] >= 0).all()
    assert found.breakdown_s["bubble"] == pytest.approx(0.0, abs=1e-12)


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


# Recomputation, experts, latent attention, ZeRO


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_recomputation_costs_compute(name):
    """Full repeats the forward pass of the layers, about a third more; selective repeats the modules that it names."""
    modules = [("core_attn",), ("core_attn", "layernorm"), ("core_attn", "layernorm", "mlp")]
    modes = [("none", ()), *(("selective", named) for named in modules), ("full", ())]
    compute_s = []
    for mode, named in modes:
        job = replace(job_of(name), recompute_modules=named)
        compute_s.append(float(estimate(job, HOST, ParallelConfig(dp=8, recompute=mode)).breakdown_s["compute"][0]))

    assert compute_s == sorted(compute_s)
    # norms of dense layers are fused with the products behind them, and Mixtral has no MLP but its experts
    assert len(set(compute_s)) == (5 if name == "deepseek-v3" else 4)
    assert 1.2 < compute_s[-1] / compute_s[0] < 1.4


def test_experts_spread_over_hosts_pay_for_it():
    """An ep over one host costs all-to-all time, one over hosts more, none of them nothing; compute gains little.

    What it gains are the sums of the weights' gradients: a rank with fewer experts has fewer of them to move.
    """
    job = job_of("mixtral-8x7b")
    found = estimate(job, find_cluster("dgx-h100", hosts=2), *(ParallelConfig(tp=2, dp=8, ep=ep) for ep in (1, 4, 8)))

    ep_s = found.breakdown_s["ep"]
    assert ep_s[0] == 0 < ep_s[1] < ep_s[2]
    compute_s = found.breakdown_s["compute"]
    assert compute_s[0] > compute_s[1] > compute_s[2] > 0.85 * compute_s[0]


def test_latent_attention_and_shared_experts_have_a_price():
    """DeepSeek-V3, with MLA, 256 experts and 3 dense layers, on 2,048 H800-like devices: a step of its paper's order.

    Its report trains 14.8T tokens in 2.664 million H800 hours, 5,556 tokens per GPU and second per 3.6e3 s: 15,360
    sequences of 4,096 tokens take 19.9 s on 2,048 devices. DualPipe's order of chunks is its own; its dispatch beside
    compute, one copy per host, and fp8 are here. A factor of two is allowed.
    """
    runtime = replace(MEGATRON, overlaps_experts=True, deduplicates_tokens=True)
    job = replace(job_of("deepseek-v3", batch=15360), precision="fp8")
    config = ParallelConfig(pp=16, dp=128, ep=64)

    found = estimate(job, find_cluster("dgx-h100", hosts=256), config, runtime=runtime)

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
    hidden_s, exposed_s = (
        estimate(job_of(batch=256), HOSTS, ParallelConfig(dp=32, zero_stage=0), runtime=runtime).breakdown_s["dp"][0]
        for runtime in (MEGATRON, replace(MEGATRON, overlaps_gradients=False))
    )

    assert exposed_s / 32 <= hidden_s < exposed_s


def test_small_work_waits_for_the_host():
    """Tiny layers are launch-bound: the step grows with the launch time, and large ones do not notice it."""
    tiny = job_of("llama3-8b", sequence_length=128, batch=8, hidden_size=256, ffn_size=512, head_dim=8, vocab_size=64)
    few, slow, large = (
        estimate(job, HOST, ParallelConfig(dp=8), runtime=replace(MEGATRON, launch_s=launch_s))
        for job, launch_s in ((tiny, 10e-6), (tiny, 100e-6), (job_of("llama3-70b", batch=8), 10e-6))
    )

    assert few.breakdown_s["host"][0] > 0
    assert slow.step_time_s[0] > 5 * few.step_time_s[0]
    # both times are joined by a smooth norm, not by the maximum
    assert large.breakdown_s["host"][0] < 1e-6 * large.step_time_s[0]


def test_a_short_message_still_takes_a_hop():
    """Plain 1F1B exposes every transfer. Interleaving exposes those that fill and empty the pipeline, chunk after
    chunk, and of the others the latency.
    """
    job = job_of()
    plain, interleaved = estimate(job, HOST, ParallelConfig(pp=8), ParallelConfig(pp=8, vpp=4)).breakdown_s["pp"]
    latency_s = send_recv_s(0.0, HOST.group_links(np.array([1]), np.array([8])))[0]

    # the last stage, which has the head, sets the pace: it exchanges with one neighbour
    hop_s = plain / (63 + 2 * 7)
    # seven hops of the first micro-batch, and three times all eight between its chunks
    assert interleaved == pytest.approx(2 * (hop_s * (7 + 3 * 8) + latency_s * 64 * 4))


# What a runtime and its memory add


def test_a_step_that_does_not_quite_fit_stalls():
    """Where the peak exceeds the device every micro-batch stalls both ways, and where it is far below none does.

    Without a memory estimate nobody asks.
    """
    job = job_of(batch=64)
    configs = [ParallelConfig(dp=8), ParallelConfig(dp=8, recompute="full")]
    runtime = replace(MEGATRON, stall_s=0.5)
    memory = MemoryEstimate(peak_bytes=np.array([2.0, 0.2]), parts_bytes={}, capacity_bytes=np.array([1.0, 1.0]))

    calm = estimate(job, HOST, *configs, runtime=runtime).breakdown_s["overhead"]
    found = estimate_step(setting_for(job, HOST, runtime), grid_of(*configs), memory=memory).breakdown_s["overhead"]

    assert found - calm == pytest.approx([2 * 0.5 * 8, 0.0], abs=1e-5)


def test_a_step_pays_once_for_what_is_not_its_passes():
    """The overhead of a step does not depend on its micro-batches, and stragglers wait longer on more hosts."""
    few, many = (estimate(job_of(batch=batch), HOST, ParallelConfig(dp=8)) for batch in (8, 64))
    hosts = estimate(job_of(batch=64), HOSTS, ParallelConfig(dp=32))

    assert few.breakdown_s["overhead"][0] == many.breakdown_s["overhead"][0] == MEGATRON.step_overhead_s
    passes_s = hosts.step_time_s[0] - hosts.breakdown_s["overhead"][0]
    assert hosts.breakdown_s["overhead"][0] == pytest.approx(
        MEGATRON.step_overhead_s + 2 * MEGATRON.straggler_share * passes_s
    )


def test_each_further_message_costs_its_latency():
    """Weights gathered layer by layer pay the collective's latency once per layer, in one bucket only once."""
    job = job_of(batch=256)
    config = ParallelConfig(dp=32)
    runtime = replace(MEGATRON, overlaps_gradients=False, overlaps_weight_gather=False)
    layers, whole = (
        float(estimate(job, HOSTS, config, runtime=replace(runtime, weight_bucket=bucket)).breakdown_s["dp"][0])
        for bucket in (0, 10**12)
    )

    latency_s = all_gather_s(0.0, place(HOSTS, grid_of(config)).weights)[0]
    assert layers - whole == pytest.approx((job.model.num_layers - 1) * latency_s)


@pytest.mark.parametrize(("runtime", "stage"), [("megatron-core", 1), ("torchtitan", 3)])
def test_states_sharded_inside_hosts_keep_their_gathers_there(runtime, stage):
    """Over a slow network, shards over one host's ranks gather faster than shards over all; the optimizer owns more.

    With one shard per rank nothing is gathered, and the reduction is that of plain data parallelism.
    """
    nic = {"kind": "infiniband", "bandwidth_gb_per_s": 5, "latency_us": 4}
    slow = cluster_from_mapping({"device": "H100-SXM-80", "hosts": 4, "nic_links": [nic]}, Path())
    profile = replace(find_runtime(runtime), overlaps_gradients=False, overlaps_weight_gather=False)
    configs = [ParallelConfig(dp=32, zero_stage=stage, dp_shard=shard) for shard in (0, 8, 1)]

    found = estimate(job_of(batch=256), slow, *configs, ParallelConfig(dp=32, zero_stage=0), runtime=profile)

    dp_s, optimizer_s = found.breakdown_s["dp"], found.breakdown_s["optimizer"]
    assert dp_s[1] < dp_s[0] or stage < 3
    assert dp_s[2] == pytest.approx(dp_s[3])
    assert optimizer_s == pytest.approx(optimizer_s[0] * np.array([1, 4, 32, 32]))


def test_transfers_over_many_hosts_stall_where_that_was_seen():
    """A runtime with stalled hosts stalls from that number of hosts on, where its pipeline leaves a host."""
    runtime = replace(MEGATRON, stalled_hosts=4, stall_s=0.5)
    job = job_of(batch=64)
    configs = ParallelConfig(pp=4, dp=8), ParallelConfig(dp=32)

    stalled = estimate(job, HOSTS, *configs, runtime=runtime).breakdown_s["overhead"]
    calm = estimate(job, HOSTS, *configs, runtime=replace(runtime, stalled_hosts=8)).breakdown_s["overhead"]

    assert stalled - calm == pytest.approx([2 * 0.5 * (8 + 4 - 1), 0.0])


def test_mfu_is_model_flops_over_peak():
    """6 N + 12 L h s per token over what the devices could do: 8 H100 at 989 TFLOP/s."""
    job = job_of("llama3-8b")
    flop = 64 * 4096 * job.model.model_flops_per_token(4096)

    utilisation = model_flops_utilisation(job, HOST, np.array([2.0]))

    assert utilisation[0] == pytest.approx(flop / (2.0 * 8 * HOST.devices[0].peak_flop_per_s("bf16")))


# Unlike devices

FAST, SLOW = "V100-SXM-16", "T4-16"
SECONDS = {FAST: 1.0, SLOW: 4.0}
CHEAP = replace(MEGATRON, launch_s=1e-6, collective_launch_s=1e-6, hop_launch_s=1e-6, step_overhead_s=1e-4)


def unlike(*groups):
    """Hosts of four devices, each (name, hosts), behind adapters of 10 Gb/s for the fast ones and 50 for the slow."""
    gigabytes = {FAST: 0.3125, SLOW: 1.5625}
    described = []
    for name, hosts in groups:
        nic = {"kind": "test", "bandwidth_gb_per_s": gigabytes[name], "latency_us": 1, "sharers": 4}
        described.append({"device": name, "hosts": hosts, "devices_per_host": 4, "nic_links": [nic]})
    return cluster_from_mapping({"groups": described}, Path())


def counted_s(operator, device, *_):
    """Every operator takes a second on the fast device and four on the slow one."""
    return np.full(len(operator.moved_bytes), SECONDS[device.name])


def by_hand(cluster, config):
    """The parts of a step with those operators, and collectives that take no time."""
    return estimate_step(
        setting_for(job_of(batch=32, vocab_size=128), cluster, CHEAP),
        grid_of(config),
        kernel_time=counted_s,
        collective_time=lambda collective: 0.0 * collective.wire_bytes,
    ).breakdown_s


BOTH_ORDERS = (((FAST, 1), (SLOW, 1)), ((SLOW, 1), (FAST, 1)))


@pytest.mark.parametrize("config", [ParallelConfig(dp=8), ParallelConfig(tp=8), ParallelConfig(tp=2, dp=4)])
def test_a_stage_with_a_slow_rank_is_as_slow_as_that(config):
    """One stage over both kinds of devices computes four times as long as on the fast ones, whichever come first."""
    fast, slow = (by_hand(unlike((name, 2)), config)["compute"][0] for name in (FAST, SLOW))

    for pair in BOTH_ORDERS:
        found = by_hand(unlike(*pair), config)["compute"][0]
        assert found == pytest.approx(slow, rel=1e-2)
        assert found == pytest.approx(4 * fast, rel=1e-2)


def test_a_pipeline_over_kinds_has_the_pace_of_the_slow_stage():
    """Two stages of 16 layers, 8 micro-batches: 8 times the slow stage, and the fast one once if it is the first."""
    config = ParallelConfig(pp=2, dp=4)
    slow, fast = (by_hand(unlike((name, 2)), config) for name in (SLOW, FAST))
    for pair in BOTH_ORDERS:
        found = by_hand(unlike(*pair), config)
        idle = float(pair[0][0] == FAST)

        assert found["compute"][0] == pytest.approx(slow["compute"][0], rel=0.02)  # the head has a few operators more
        assert found["bubble"][0] == pytest.approx(idle * found["compute"][0] / 8 / 4, rel=0.05, abs=1e-9)
        assert found["bubble"][0] == pytest.approx(idle * fast["bubble"][0], rel=0.05, abs=1e-9)


HALF, PIPELINE = replace(job_of(batch=64), precision="fp16"), ParallelConfig(pp=4, dp=4)


@pytest.mark.parametrize("runtime", ["megatron-core", "nanotron", "maxtext"])
def test_one_stage_does_not_care_which_hosts_come_first(runtime):
    """What hides behind compute hides behind that of the device that the stage waits for."""
    profile = replace(find_runtime(runtime), residuals=())
    first, second = (
        estimate(HALF, unlike(*order), ParallelConfig(tp=4, dp=4), runtime=profile).step_time_s[0]
        for order in (((FAST, 2), (SLOW, 2)), ((SLOW, 2), (FAST, 2)))
    )

    assert first == pytest.approx(second, rel=1e-12)


def test_replicas_on_unlike_hosts_reduce_at_the_slower_adapter():
    """A ring over four hosts moves 2 * 15/16 of the gradients through 10 Gb/s per host, of which it reaches 80%."""
    plain = replace(CHEAP, overlaps_gradients=False, network_efficiency=1.0, gradient_message_bytes=4)
    found = estimate(HALF, unlike((FAST, 3), (SLOW, 1)), ParallelConfig(dp=16, zero_stage=0), runtime=plain)

    expected_s = HALF.model.num_parameters * 4 * 2 * 15 / 16 / (0.8 * 1.25e9)
    assert found.breakdown_s["dp"][0] == pytest.approx(expected_s, rel=0.01)


def test_a_tied_table_is_summed_between_the_ends():
    """First and last stage send each other the table's gradients once per step, four ranks per adapter."""
    tied = replace(HALF, model=HALF.model.changed(tied_embeddings=True))
    plain = replace(CHEAP, network_efficiency=1.0, gradient_bytes=2)
    first, second, alone = (
        estimate(job, unlike((FAST, 3), (SLOW, 1)), config, runtime=plain).breakdown_s["pp"][0]
        for job, config in ((HALF, PIPELINE), (tied, PIPELINE), (tied, ParallelConfig(tp=4, dp=4)))
    )

    table_bytes = 2 * HALF.model.embedding.table
    assert second - first == pytest.approx(table_bytes / (0.8 * 0.3125e9), rel=0.01)
    assert alone == 0
