from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.communication import Beside, block_communication
from costmodels.step.placement import place
from hardware.cluster_file import find_cluster
from hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_recv_s
from tests.support.settings.model_parts import row_of
from tests.support.settings.random_settings import cases, grid_of, job_of

MEGATRON = replace(find_runtime("megatron-core"), network_efficiency=1.0, overlap_efficiency=1.0, expert_imbalance=0.0)
NANOTRON = find_runtime("nanotron")
HOST = find_cluster("dgx-h100")
LLAMA, LONG, MIXTRAL = job_of(), job_of(sequence_length=32768), job_of("mixtral-8x7b")


def compute_of(job, num_configs, *, core_s=0.0, weight_gradients_s=0.0):
    """Compute beside which communication may run: so many seconds in every block."""
    size = (len(job.model.blocks), num_configs)
    return Beside(
        products=np.full(size, 3 * weight_gradients_s),
        weight_gradients=np.full(size, weight_gradients_s),
        core=np.full(size, core_s),
    )


def communication(job, cluster, *configs, runtime=MEGATRON, **compute_s):
    """What the configurations expose; `core_s` seconds of attention and others may hide some of it."""
    grid = grid_of(*configs)
    return block_communication(job, runtime, grid, place(cluster, grid), compute_of(job, len(grid), **compute_s))


def exposed(found, job, part, block):
    """The exposed time of one part of the breakdown in one block of the model [n]."""
    return found.exposed[EXPOSED_PARTS.index(part), row_of(job.model, block)]


def issued(found, job, block):
    """The number of collectives that one block of the model issues [n]."""
    return found.collectives[row_of(job.model, block)]


def ring_s(found):
    """The exposed time of the ring in the attention of LONG [s]."""
    return exposed(found, LONG, "cp", "attention")[0]


@given(cases())
def test_a_degree_of_one_exposes_nothing(case):
    """Exposed times are finite and never negative; a dimension of degree 1 has none and issues no collective."""
    groups = place(case.cluster, case.grid)
    found = block_communication(case.job, case.runtime, case.grid, groups, compute_of(case.job, len(case.grid)))

    assert found.exposed.shape == (len(EXPOSED_PARTS), len(case.job.model.blocks), len(case.grid))
    for part, seconds in zip(EXPOSED_PARTS, found.exposed, strict=True):
        assert np.all(np.isfinite(seconds))
        assert np.all(seconds >= 0)
        assert np.all(seconds[:, getattr(case.grid, part) == 1] == 0)
    alone = (case.grid.tp == 1) & (case.grid.cp == 1) & (case.grid.up == 1) & (case.grid.ep == 1)
    assert np.all(found.collectives[:, alone] == 0)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallelism_has_four_all_reduces_per_layer(tp):
    """Two per pass and layer, of the whole hidden state each (Shoeybi et al. 2019, section 3).

    They take longer where the network is less efficient.
    """
    config = ParallelConfig(tp=tp, dp=8 // tp, mbs=2, sequence_parallel=False)
    link = place(HOST, grid_of(config)).tp

    found, lossy = (
        communication(LLAMA, HOST, config, runtime=replace(MEGATRON, network_efficiency=efficiency))
        for efficiency in (1.0, 0.5)
    )

    attention_s, lossy_s = (exposed(each, LLAMA, "tp", "attention")[0] for each in (found, lossy))
    layer_s = attention_s + exposed(found, LLAMA, "tp", "dense_mlp")[0]
    assert layer_s == pytest.approx(4 * all_reduce_s(2 * 2 * 4096 * 4096, link)[0])
    assert attention_s < lossy_s <= 2 * attention_s


def test_sequence_parallelism_sends_the_same_bytes_in_two_halves():
    """A reduce-scatter and an all-gather replace each all-reduce, and the backward pass gathers the input again.

    Source: Korthikanti et al. 2022, section 4.2.2; the input's other parts are not kept. Where they are, one gather is
    saved.
    """
    config = ParallelConfig(tp=8, mbs=2)
    link, message = place(HOST, grid_of(config)).tp, 2 * 2 * 4096 * 4096
    gather_s = all_gather_s(message, link)[0]

    again, kept = (
        communication(LLAMA, HOST, config, runtime=replace(MEGATRON, gathers_inputs_again=gathers))
        for gathers in (True, False)
    )

    half_s = gather_s + reduce_scatter_s(message, link)[0]
    assert exposed(again, LLAMA, "tp", "attention")[0] == pytest.approx(2 * half_s + gather_s)
    assert exposed(kept, LLAMA, "tp", "attention")[0] == pytest.approx(2 * half_s)
    assert [issued(each, LLAMA, "attention")[0] for each in (again, kept)] == [5, 4]
    assert half_s >= all_reduce_s(message, link)[0]


def test_full_recomputation_repeats_the_forward_collectives():
    """With full recomputation tp, up and ep have three passes, and the ring four exchanges instead of three.

    Of five gathers and scatters without it the forward pass has two.
    """
    configs = [
        ParallelConfig(tp=2, cp=2, up=2, dp=8, ep=4, recompute=mode, sequence_parallel=True)
        for mode in ("none", "full")
    ]

    found = communication(MIXTRAL, find_cluster("dgx-h100", hosts=8), *configs)

    for part, block, ratio in (
        *(("tp", "moe_mlp", 3 / 2), ("up", "attention", 3 / 2), ("ep", "moe_mlp", 3 / 2)),
        *(("tp", "attention", 7 / 5), ("cp", "attention", 4 / 3)),
    ):
        none_s, full_s = exposed(found, MIXTRAL, part, block)
        assert full_s == pytest.approx(ratio * none_s)
        assert none_s > 0


def test_ring_passes_keys_and_values_once_forward_and_twice_backward():
    """Each exchange sends the local keys and values around (Liu et al. 2023); backward sends their gradients too.

    In fp32 these gradients are twice what they are in 16 bits.
    """
    config = ParallelConfig(cp=8)
    block_bytes, link = 2 * 2 * 32768 / 8 * 8 * 128, place(HOST, grid_of(config)).cp

    narrow, wide = (
        ring_s(communication(LONG, HOST, config, runtime=replace(MEGATRON, fp32_ring_gradients=is_wide)))
        for is_wide in (False, True)
    )

    one_s, twice_s = (send_recv_s(times * block_bytes, link)[0] for times in (1, 2))
    # of the 8 messages back, Transformer Engine joins six of keys and values with six of their gradients
    assert narrow == pytest.approx((7 + 2) * one_s + 6 * twice_s)
    assert wide == pytest.approx(7 * (2 * one_s + twice_s))


@pytest.mark.parametrize(("modules", "repeats"), [(("core_attn",), True), (("layernorm",), False)])
def test_selective_recomputation_of_the_core_repeats_its_exchanges(modules, repeats):
    """Ring and Ulysses stand inside the attention core, and run again with it, but tp's collectives do not."""
    job = replace(job_of("llama3-8b", batch=64), recompute_modules=modules)
    none, selective = (ParallelConfig(tp=2, cp=2, up=2, recompute=mode) for mode in ("none", "selective"))

    found = communication(job, HOST, none, selective)

    (ring, ring_again), (heads, heads_again), (tensor, tensor_again) = (
        exposed(found, job, part, "attention") for part in ("cp", "up", "tp")
    )
    assert ring_again == pytest.approx(ring * (4 / 3 if repeats else 1))
    assert heads_again == pytest.approx(heads * (3 / 2 if repeats else 1))
    assert tensor_again == tensor


def test_attention_hides_the_ring_where_the_runtime_overlaps_it():
    """Enough attention hides every exchange but its latency; half as much hides a part; nanotron hides none."""
    config = ParallelConfig(cp=8)

    def exposed_s(core_s, runtime=MEGATRON):
        return ring_s(communication(LONG, HOST, config, runtime=runtime, core_s=core_s))

    bare_s = exposed_s(0.0)
    latency_s = (7 + 8) * send_recv_s(0.0, place(HOST, grid_of(config)).cp)[0]
    assert exposed_s(bare_s * 8 / 7) == pytest.approx(latency_s)
    assert exposed_s(bare_s / 2) == pytest.approx(bare_s * (1 - 7 / 16))
    assert exposed_s(0.0, NANOTRON) == exposed_s(1.0, NANOTRON) > 0


@pytest.mark.parametrize(
    ("name", "elements"), [("llama3-8b", (32 + 8 + 8 + 32) * 128), ("deepseek-v3", 128 * (192 + 192 + 128 + 128))]
)
def test_ulysses_exchanges_queries_keys_values_and_the_output(name, elements):
    """Each pass moves q, k, v before attention and the output after it (Jacobs et al. 2023, section 3.2).

    With MLA queries and keys have 192 elements, values and output 128 per head (DeepSeek-V3).
    """
    config = ParallelConfig(up=8)

    job = job_of(name)

    found = communication(job, HOST, config)

    sent_s = all_to_all_s(2 * 4096 / 8 * elements, place(HOST, grid_of(config)).up)[0]
    assert exposed(found, job, "up", "attention")[0] == pytest.approx(2 * sent_s)


def test_experts_dispatch_and_combine_in_both_passes():
    """Every token goes to its top_k experts and back, twice (Lepikhin et al. 2020, section 3.2)."""
    config = ParallelConfig(dp=8, ep=8, mbs=1)

    found = communication(MIXTRAL, HOST, config)

    routed = 2 * 4096 * 4096 * 2
    expected_s = 4 * all_to_all_s(routed, place(HOST, grid_of(config)).ep)[0]
    assert exposed(found, MIXTRAL, "ep", "moe_mlp")[0] == pytest.approx(expected_s)
    assert issued(found, MIXTRAL, "moe_mlp")[0] == 4


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

    Beside all products both hide, but for the fifth that an overlap efficiency of 0.8 leaves of them.
    """

    def exposed_s(**facts):
        runtime = replace(MEGATRON, **{"overlaps_tensor": False, "overlaps_tensor_gradients": False} | facts)
        found = communication(LLAMA, HOST, ParallelConfig(tp=8), runtime=runtime, weight_gradients_s=1.0)
        return exposed(found, LLAMA, "tp", "dense_mlp")[0]

    bare_s = exposed_s()
    assert exposed_s(overlaps_tensor_gradients=True) == pytest.approx(2 / 5 * bare_s)
    assert exposed_s(overlaps_tensor=True) == pytest.approx(0.0, abs=1e-12)
    assert exposed_s(overlaps_tensor=True, overlap_efficiency=0.8) == pytest.approx(0.2 * bare_s)


def test_experts_without_tensor_parallelism_gather_nothing():
    """With expert_tp = 1 a layer's experts have no tp collective, and their tokens go to as many ranks more."""
    configs = (ParallelConfig(tp=2, dp=4, ep=4), ParallelConfig(tp=2, dp=4, ep=8, expert_tp=1))
    found = communication(MIXTRAL, HOST, *configs)

    tensor, no_tensor = exposed(found, MIXTRAL, "tp", "moe_mlp")
    near, far = exposed(found, MIXTRAL, "ep", "moe_mlp")
    assert tensor > 0 == no_tensor
    assert near < far < 1.3 * near


def test_a_token_is_sent_once_to_experts_that_stand_together():
    """Where a runtime sends one copy per host, eight experts drawn from two hosts cost two copies, not eight."""
    job = job_of("deepseek-v3")
    config = ParallelConfig(dp=16, ep=16)
    hosts = find_cluster("dgx-h100", hosts=2)
    plain, distinct = (
        communication(job, hosts, config, runtime=replace(MEGATRON, deduplicates_tokens=is_distinct))
        for is_distinct in (False, True)
    )
    plain, distinct = (exposed(found, job, "ep", "moe_mlp")[0] for found in (plain, distinct))

    assert distinct == pytest.approx(plain * 2 * (1 - 0.5**8) / 8, rel=0.05)  # the latencies do not shrink


@pytest.mark.parametrize("dp_shard", [1, 4, 8])
def test_shards_stand_side_by_side(dp_shard):
    """The ranks of one copy of the states are neighbours, inside a host as long as they fit."""
    grid = grid_of(ParallelConfig(tp=2, dp=16, dp_shard=dp_shard))
    groups = place(find_cluster("dgx-h100", hosts=4), grid)

    assert groups.weights.size[0] == dp_shard
    assert groups.weight_copies.size[0] == 16 // dp_shard
    assert groups.weights.domains[0] == max(dp_shard // 4, 1)
    assert groups.weight_copies.domains[0] == min(16 // dp_shard, 4)
