from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.layer_operators import Block
from costmodels.step.communication import Beside, block_communication
from costmodels.step.placement import place
from hardware.cluster import find_cluster
from hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_recv_s
from tests.support.settings.random_settings import cases, grid_of, job_of

MEGATRON = replace(find_runtime("megatron-core"), network_efficiency=1.0, overlap_efficiency=1.0, expert_imbalance=0.0)
NANOTRON = find_runtime("nanotron")
HOST = find_cluster("dgx-h100")


def compute_of(num_configs, *, core_s=0.0, weight_gradients_s=0.0):
    """Compute beside which communication may run: so many seconds in every block."""
    return Beside(
        products={block: np.full(num_configs, 3 * weight_gradients_s) for block in Block},
        weight_gradients={block: np.full(num_configs, weight_gradients_s) for block in Block},
        attention_core=np.full(num_configs, core_s),
    )


def communication(job, cluster, *configs, runtime=MEGATRON, **compute_s):
    """What the configurations expose; `core_s` seconds of attention and others may hide some of it."""
    grid = grid_of(*configs)
    return block_communication(job, runtime, grid, place(cluster, grid), compute_of(len(grid), **compute_s))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_degree_of_one_exposes_nothing(case):
    """Exposed times are finite and never negative; a dimension of degree 1 has none and issues no collective."""
    groups = place(case.cluster, case.grid)
    found = block_communication(case.job, case.runtime, case.grid, groups, compute_of(len(case.grid)))

    for degree, seconds in (
        *((case.grid.tp, block_s) for block_s in found.tp.values()),
        (case.grid.cp, found.cp),
        (case.grid.up, found.up),
        (case.grid.ep, found.ep),
    ):
        assert np.all(np.isfinite(seconds))
        assert np.all(seconds >= 0)
        assert np.all(seconds[degree == 1] == 0)
    alone = (case.grid.tp == 1) & (case.grid.cp == 1) & (case.grid.up == 1) & (case.grid.ep == 1)
    for count in found.collectives.values():
        assert np.all(count[alone] == 0)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_has_four_all_reduces_per_layer(tp):
    """Two per pass and layer, of the whole hidden state each (Shoeybi et al. 2019, section 3)."""
    job = job_of("llama3-8b")
    config = ParallelConfig(tp=tp, dp=8 // tp, mbs=2, sequence_parallel=False)
    link = place(HOST, grid_of(config)).tp

    found = communication(job, HOST, config)

    layer_s = found.tp[Block.ATTENTION][0] + found.tp[Block.DENSE_MLP][0]
    assert layer_s == pytest.approx(4 * all_reduce_s(2 * 2 * 4096 * 4096, link)[0])


def test_sequence_parallelism_sends_the_same_bytes_in_two_halves():
    """A reduce-scatter and an all-gather replace each all-reduce, and the backward pass gathers the input again.

    Source: Korthikanti et al. 2022, section 4.2.2; the input's other parts are not kept.
    """
    job = job_of("llama3-8b")
    config = ParallelConfig(tp=8, mbs=2)
    link = place(HOST, grid_of(config)).tp
    message = 2 * 2 * 4096 * 4096

    found = communication(job, HOST, config)

    half = all_gather_s(message, link)[0] + reduce_scatter_s(message, link)[0]
    assert found.tp[Block.ATTENTION][0] == pytest.approx(2 * half + all_gather_s(message, link)[0])
    assert found.collectives[Block.ATTENTION][0] == 5
    assert half >= all_reduce_s(message, link)[0]


def test_inputs_kept_as_gathered_are_not_gathered_again():
    """Then each pass has one gather and one scatter, as many as a runtime without that has, but for one gather."""
    job = job_of("llama3-8b")
    config = ParallelConfig(tp=8, mbs=2)
    gather_s = all_gather_s(2 * 2 * 4096 * 4096, place(HOST, grid_of(config)).tp)[0]

    again, kept = (
        communication(job, HOST, config, runtime=replace(MEGATRON, gathers_inputs_again=gathers))
        for gathers in (True, False)
    )

    assert kept.tp[Block.ATTENTION][0] == pytest.approx(again.tp[Block.ATTENTION][0] - gather_s)
    assert kept.collectives[Block.ATTENTION][0] == 4


def test_full_recomputation_repeats_the_forward_collectives():
    """With full recomputation tp, up and ep have three passes, and the ring four exchanges instead of three.

    Of five gathers and scatters without it the forward pass has two.
    """
    job = job_of("mixtral-8x7b")
    configs = [
        ParallelConfig(tp=2, cp=2, up=2, dp=8, ep=4, recompute=mode, sequence_parallel=True)
        for mode in ("none", "full")
    ]

    found = communication(job, find_cluster("dgx-h100", hosts=8), *configs)

    for seconds in (found.tp[Block.MOE_MLP], found.up, found.ep):
        assert seconds[1] == pytest.approx(1.5 * seconds[0])
    assert found.tp[Block.ATTENTION][1] == pytest.approx(7 / 5 * found.tp[Block.ATTENTION][0])
    assert found.cp[1] == pytest.approx(4 / 3 * found.cp[0])


def test_ring_passes_keys_and_values_once_forward_and_twice_backward():
    """Each exchange sends the local keys and values around (Liu et al. 2023); backward sends their gradients too."""
    job = job_of("llama3-8b", sequence_length=32768)
    config = ParallelConfig(cp=8)
    all_keys_and_values = 2 * 2 * 32768 * 8 * 128

    found = communication(job, HOST, config)

    one = 7 * send_recv_s(all_keys_and_values / 8, place(HOST, grid_of(config)).cp)[0]
    assert found.cp[0] == pytest.approx(3 * one)


def test_gradients_on_the_ring_may_be_wider():
    """In fp32 the gradients of keys and values are twice what these are in 16 bits."""
    job = job_of("llama3-8b", sequence_length=32768)
    config = ParallelConfig(cp=8)
    block_bytes = 2 * 2 * 32768 / 8 * 8 * 128
    link = place(HOST, grid_of(config)).cp

    found = communication(job, HOST, config, runtime=replace(MEGATRON, fp32_ring_gradients=True))

    expected = 7 * (2 * send_recv_s(block_bytes, link)[0] + send_recv_s(2 * block_bytes, link)[0])
    assert found.cp[0] == pytest.approx(expected)


@pytest.mark.parametrize(("modules", "repeats"), [(("core_attn",), True), (("layernorm",), False)])
def test_selective_recomputation_of_the_core_repeats_its_exchanges(modules, repeats):
    """Ring and Ulysses stand inside the attention core, and run again with it, but tp's collectives do not."""
    job = replace(job_of("llama3-8b", batch=64), recompute_modules=modules)
    none, selective = (ParallelConfig(tp=2, cp=2, up=2, recompute=mode) for mode in ("none", "selective"))

    found = communication(job, HOST, none, selective)

    assert found.cp[1] == pytest.approx(found.cp[0] * (4 / 3 if repeats else 1))
    assert found.up[1] == pytest.approx(found.up[0] * (3 / 2 if repeats else 1))
    assert found.tp[Block.ATTENTION][1] == found.tp[Block.ATTENTION][0]


def test_attention_hides_the_ring_where_the_runtime_overlaps_it():
    """Enough attention hides every exchange but its latency; half as much hides a part; nanotron hides none."""
    job = job_of("llama3-8b", sequence_length=32768)
    config = ParallelConfig(cp=8)
    bare = communication(job, HOST, config).cp[0]

    latency_s = 3 * 7 * send_recv_s(0.0, place(HOST, grid_of(config)).cp)[0]
    assert communication(job, HOST, config, core_s=bare * 8 / 7).cp[0] == pytest.approx(latency_s)
    assert communication(job, HOST, config, core_s=bare / 2).cp[0] == pytest.approx(bare * (1 - 7 / 16))
    hidden = [communication(job, HOST, config, runtime=NANOTRON, core_s=core_s).cp[0] for core_s in (0.0, 1.0)]
    assert hidden[0] == hidden[1] > 0


def test_ulysses_exchanges_queries_keys_values_and_the_output():
    """Each pass moves q, k, v before attention and the output after it (Jacobs et al. 2023, section 3.2)."""
    job = job_of("llama3-8b")
    config = ParallelConfig(up=8)
    per_rank = 2 * 4096 / 8 * (32 + 8 + 8 + 32) * 128

    found = communication(job, HOST, config)

    assert found.up[0] == pytest.approx(2 * all_to_all_s(per_rank, place(HOST, grid_of(config)).up)[0])


def test_grouped_queries_shrink_ring_and_ulysses_alike():
    """Fewer key heads are less traffic; the ring, which moves nothing else, gains their full share but for latency.

    A hop has a base time of some microseconds whatever it carries, less of it in the protocols for short messages.
    """
    fewer, all_heads = (job_of("llama3-8b", sequence_length=131072, num_kv_heads=heads) for heads in (8, 32))
    config = ParallelConfig(cp=2, up=4)

    few, many = communication(fewer, HOST, config), communication(all_heads, HOST, config)

    assert few.up[0] < many.up[0]
    latency_s = 3 * send_recv_s(0.0, place(HOST, grid_of(config)).cp)[0]
    assert many.cp[0] - latency_s == pytest.approx(4 * (few.cp[0] - latency_s), rel=0.01)


def test_latent_attention_moves_heads_of_its_own_sizes():
    """With MLA Ulysses moves queries and keys of 192, values and output of 128 per head (DeepSeek-V3)."""
    job = job_of("deepseek-v3")
    config = ParallelConfig(up=8)
    per_rank = 2 * 4096 / 8 * 128 * (192 + 192 + 128 + 128)

    found = communication(job, HOST, config)

    assert found.up[0] == pytest.approx(2 * all_to_all_s(per_rank, place(HOST, grid_of(config)).up)[0])


def test_experts_dispatch_and_combine_in_both_passes():
    """Every token goes to its top_k experts and back, twice (Lepikhin et al. 2020, section 3.2)."""
    job = job_of("mixtral-8x7b")
    config = ParallelConfig(dp=8, ep=8, mbs=1)

    found = communication(job, HOST, config)

    routed = 2 * 4096 * 4096 * 2
    assert found.ep[0] == pytest.approx(4 * all_to_all_s(routed, place(HOST, grid_of(config)).ep)[0])
    assert found.collectives[Block.MOE_MLP][0] == 4


def test_a_dense_model_has_no_expert_traffic():
    """Without experts nothing is dispatched, and the MoE block has no collective."""
    found = communication(job_of("llama3-8b"), HOST, ParallelConfig(tp=8))

    assert found.ep[0] == 0
    assert found.tp[Block.MOE_MLP][0] == 0


def test_slower_links_cost_more():
    """The same tensor parallel group takes longer where it crosses hosts, and where the network is less efficient."""
    job = job_of("llama3-8b")
    inside = communication(job, find_cluster("dgx-h100", hosts=2), ParallelConfig(tp=8, dp=2))
    across = communication(job, find_cluster("dgx-h100", hosts=2), ParallelConfig(tp=16))
    lossy = communication(
        job,
        find_cluster("dgx-h100", hosts=2),
        ParallelConfig(tp=8, dp=2),
        runtime=replace(MEGATRON, network_efficiency=0.5),
    )

    assert across.tp[Block.ATTENTION][0] > inside.tp[Block.ATTENTION][0]
    assert inside.tp[Block.ATTENTION][0] < lossy.tp[Block.ATTENTION][0] <= 2 * inside.tp[Block.ATTENTION][0]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_an_expert_is_reduced_over_all_ranks_that_hold_it(case):
    """All ranks of a stage hold a share of each layer's experts, also with cp, up and an expert_tp of their own.

    The groups that split them, deal them, shard their states and copy those have all ranks as their product.
    """
    whole = case.grid.tp * case.grid.dp * case.grid.cp * case.grid.up
    grid = case.grid.take(whole % (case.grid.expert_tensor * case.grid.ep * case.grid.copies) == 0)
    groups = place(case.cluster, grid)

    together = groups.expert_tp.size * groups.ep.size * groups.expert_weights.size * groups.expert_copies.size
    assert np.array_equal(together, grid.tp * grid.dp * grid.cp * grid.up)
    assert np.array_equal(groups.weights.size * groups.weight_copies.size, grid.dp * grid.cp * grid.up)


# What runtimes hide, and degrees of the experts' own


def test_a_weight_gradient_hides_the_collective_beside_it():
    """Where tp collectives run beside the weights' gradients, the backward pass's hide there, the forward's do not.

    Beside all products both hide.
    """
    job = job_of("llama3-8b")
    config = ParallelConfig(tp=8)
    modes = {
        name: replace(MEGATRON, overlaps_tensor=name == "all", overlaps_tensor_gradients=name == "gradients")
        for name in ("none", "gradients", "all")
    }

    bare, gradients, everything = (
        communication(job, HOST, config, runtime=runtime, weight_gradients_s=1.0).tp[Block.DENSE_MLP][0]
        for runtime in modes.values()
    )

    assert gradients == pytest.approx(2 / 5 * bare)
    assert everything == pytest.approx(0.0, abs=1e-12)


def test_hidden_traffic_still_costs_what_overlap_does_not_reach():
    """An overlap efficiency of 0.8 leaves a fifth of what runs beside long compute."""
    job = job_of("llama3-8b")
    partial = replace(MEGATRON, overlap_efficiency=0.8, overlaps_tensor=True)

    bare = communication(job, HOST, ParallelConfig(tp=8), runtime=partial).tp[Block.ATTENTION][0]
    beside = communication(job, HOST, ParallelConfig(tp=8), runtime=partial, weight_gradients_s=1.0)

    assert beside.tp[Block.ATTENTION][0] == pytest.approx(0.2 * bare)


def test_experts_without_tensor_parallelism_gather_nothing():
    """With expert_tp = 1 a layer's experts have no tp collective, and their tokens go to as many ranks more."""
    job = job_of("mixtral-8x7b")
    found = communication(job, HOST, ParallelConfig(tp=2, dp=4, ep=4), ParallelConfig(tp=2, dp=4, ep=8, expert_tp=1))

    assert found.tp[Block.MOE_MLP][0] > 0 == found.tp[Block.MOE_MLP][1]
    assert found.ep[0] < found.ep[1] < 1.3 * found.ep[0]


def test_a_token_is_sent_once_to_experts_that_stand_together():
    """Where a runtime sends one copy per host, eight experts drawn from two hosts cost two copies, not eight."""
    job = job_of("deepseek-v3")
    config = ParallelConfig(dp=16, ep=16)
    hosts = find_cluster("dgx-h100", hosts=2)
    plain, distinct = (
        communication(job, hosts, config, runtime=replace(MEGATRON, deduplicates_tokens=is_distinct)).ep[0]
        for is_distinct in (False, True)
    )

    assert distinct == pytest.approx(plain * 2 * (1 - 0.5**8) / 8, rel=0.05)  # the latencies do not shrink


@pytest.mark.parametrize("dp_shard", [1, 2, 4, 8])
def test_shards_stand_side_by_side(dp_shard):
    """The ranks of one copy of the states are neighbours, inside a host as long as they fit."""
    grid = grid_of(ParallelConfig(tp=2, dp=16, dp_shard=dp_shard))
    groups = place(find_cluster("dgx-h100", hosts=4), grid)

    assert groups.weights.size[0] == dp_shard
    assert groups.weight_copies.size[0] == 16 // dp_shard
    assert groups.weights.hosts[0] == max(dp_shard // 4, 1)
    assert groups.weight_copies.hosts[0] == min(16 // dp_shard, 4)
