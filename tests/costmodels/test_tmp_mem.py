from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.memory import MEMORY_PARTS, estimate_memory, layer_activations
from costmodels.parallel import ParallelConfig
from costmodels.placement import local_parameters
from costmodels.runtime import RuntimeProfile, find_runtime
from costmodels.schedules import assign_layers
from hardware.cluster import cluster_from_mapping, find_cluster
from tests.costmodels.random_settings import cases, grid_of, job_of

MEGATRON = find_runtime("megatron-core")
STATES = ("weights", "gradients", "optimizer")


def bare(gradient_bytes: int) -> RuntimeProfile:
    """A runtime that adds nothing to the tally."""
    slack = {name: 0.0 for name in ("allocator_slack", "activation_slack") if hasattr(MEGATRON, name)}
    return replace(MEGATRON, gradient_bytes=gradient_bytes, memory_overhead_bytes=0, **slack)


def state_bytes_per_parameter(config: ParallelConfig, *, gradient_bytes: int) -> float:
    """Weights, gradients and optimizer states that one rank keeps per parameter of the model."""
    job = job_of("llama-7b", batch=256)
    cluster = find_cluster("dgx-h100", hosts=config.num_devices // 8)
    found = estimate_memory(job, cluster, bare(gradient_bytes), grid_of(config))
    return sum(float(found.parts_bytes[part][0]) for part in STATES) / job.model.num_parameters


# Activations

GPT = {"num_heads": 64, "num_kv_heads": 64, "head_dim": 96, "ffn_size": 4 * 6144}  # gpt-22b of Korthikanti, table 3


@pytest.mark.parametrize("mbs", [1, 4])
def test_activations_of_a_gpt_layer_are_34_sbh(mbs):
    """34 s b h less the two dropout masks, and flash attention's log-sum-exp instead of 5 a s^2 b.

    Source: Korthikanti et al. 2022, section 4.1, equation 1, whose tally has a one-byte mask of s b h after attention
    and after the MLP; models of today have no dropout.
    """
    job = job_of("gpt-22b", sequence_length=2048, hidden_size=6144, **GPT)
    sbh = 2048 * mbs * 6144
    log_sum_exp = 4 * 2048 * mbs * 64

    kept = layer_activations(job, grid_of(ParallelConfig(mbs=mbs))).dense[0]

    assert kept == 34 * sbh - 2 * sbh + log_sum_exp


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallelism_divides_part_of_the_activations_and_sequence_parallelism_all(t):
    """10 s b h + 24 s b h / t without, 34 s b h / t with sequence parallelism (equations 2 and 4), less the masks."""
    job = job_of("gpt-22b", sequence_length=2048, hidden_size=6144, **GPT)
    sbh = 2048 * 6144
    log_sum_exp = 4 * 2048 * 64 / t

    with_sp, without = layer_activations(
        job, grid_of(ParallelConfig(tp=t), ParallelConfig(tp=t, sequence_parallel=False))
    ).dense

    assert with_sp == 32 * sbh / t + log_sum_exp
    assert without == (10 - 2) * sbh + 24 * sbh / t + log_sum_exp


def test_context_parallelism_divides_activations():
    """Ring attention and Ulysses both split the sequence, and with it everything that a layer keeps."""
    whole, ring, ulysses = layer_activations(
        job_of("llama3-8b"), grid_of(ParallelConfig(), ParallelConfig(cp=8), ParallelConfig(up=8))
    ).dense

    assert ring == ulysses == whole / 8


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_full_recomputation_keeps_the_layers_input_alone(name):
    """Kept: one hidden state. While a layer is recomputed: everything that it would have kept."""
    job = job_of(name)
    none, selective, full = (
        layer_activations(job, grid_of(ParallelConfig(recompute=mode))) for mode in ("none", "selective", "full")
    )

    assert full.dense[0] == full.moe[0] == 2 * 4096 * job.model.hidden_size
    assert (full.dense_working[0], full.moe_working[0]) == (none.dense[0], none.moe[0])
    assert full.dense[0] < selective.dense[0] < none.dense[0]
    assert none.dense_working[0] == 0


def test_grouped_queries_keep_fewer_keys():
    """8 instead of 32 key heads of 128 save 2 * 2 * 24 * 128 bytes per token."""
    few, many = (
        layer_activations(job_of("llama3-8b", num_kv_heads=heads), grid_of(ParallelConfig())).dense[0]
        for heads in (8, 32)
    )

    assert many - few == 2 * 2 * 24 * 128 * 4096


def test_experts_keep_their_tokens_top_k_times():
    """A token visits top_k experts, and each keeps its input, inner values and output."""
    one, two = (layer_activations(job_of("mixtral-8x7b", top_k=k), grid_of(ParallelConfig())).moe[0] for k in (1, 2))

    assert two - one == 2 * 4096 * (4096 * 2 + 14336 * 3)


# Training states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_are_those_of_zeros_first_figure(stage, gigabytes):
    """7.5 billion parameters on 64 devices, K = 12: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al. 2020, figure 1)."""
    per_parameter = state_bytes_per_parameter(ParallelConfig(dp=64, zero_stage=stage), gradient_bytes=2)

    assert per_parameter * 7.5 == pytest.approx(gigabytes, abs=0.051)


@pytest.mark.parametrize("dp", [8, 64])
def test_states_are_those_of_megatrons_documentation(dp):
    """bf16 with fp32 gradients: 18 bytes per parameter, 6 + 12/d with the distributed optimizer.

    Source: Megatron-LM docs, distributed optimizer, table of theoretical memory.
    """
    whole = state_bytes_per_parameter(ParallelConfig(dp=dp, zero_stage=0), gradient_bytes=4)
    sharded = state_bytes_per_parameter(ParallelConfig(dp=dp, zero_stage=1), gradient_bytes=4)

    assert whole == pytest.approx(18, rel=1e-5)
    assert sharded == pytest.approx(6 + 12 / dp, rel=1e-5)


def test_context_parallel_ranks_share_the_states_too():
    """ZeRO shards over dp, cp and up together: all of them hold the same weights."""
    by_dp = state_bytes_per_parameter(ParallelConfig(dp=64), gradient_bytes=4)
    by_all = state_bytes_per_parameter(ParallelConfig(dp=4, cp=4, up=4), gradient_bytes=4)

    assert by_dp == pytest.approx(by_all, rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("pp", [1, 4, 16])
@pytest.mark.parametrize("name", ["llama-7b", "llama2-34b", "qwen2.5-7b", "mixtral-8x7b", "llama3-8b"])
def test_ranks_together_hold_the_model(name, pp, tp):
    """Over all stages, tp times a rank's share, norms counted once, is the model's number of parameters.

    Within the final norm, which is left out, and Qwen2's biases of the keys' projections: less than 1e-5 of the model.
    """
    job = job_of(name)
    model = job.model
    tp = min(tp, model.num_kv_heads)
    stages = assign_layers(model, MEGATRON, pp, 1)
    copied_per_layer = model.norm_parameters

    local = local_parameters(job, grid_of(ParallelConfig(pp=pp, tp=tp)), stages)

    copies = (tp - 1) * (model.num_layers * copied_per_layer + model.num_moe_layers * model.router_parameters)
    total = tp * (local.dense.sum() + local.expert.sum()) - copies
    assert total == pytest.approx(model.num_parameters, rel=1e-5)


def test_experts_are_divided_by_ep_and_tp():
    """8 experts on ep 4 leave 2 to a rank; what is no expert stays whole."""
    job = job_of("mixtral-8x7b")
    stages = assign_layers(job.model, MEGATRON, 1, 1)
    whole, split = (local_parameters(job, grid_of(ParallelConfig(tp=2, dp=4, ep=ep)), stages) for ep in (1, 4))

    assert split.expert[0, 0] == whole.expert[0, 0] / 4
    assert whole.expert[0, 0] == 32 * 8 * job.model.expert_parameters / 2
    assert split.dense[0, 0] == whole.dense[0, 0]


def test_zero_shards_experts_over_their_own_replicas():
    """With ep = dp an expert has one copy, so the optimizer states of experts are not sharded any further."""
    job = job_of("mixtral-8x7b")
    cluster = find_cluster("dgx-h100")
    split = estimate_memory(job, cluster, bare(4), grid_of(ParallelConfig(dp=8, ep=8))).parts_bytes["optimizer"][0]
    whole = estimate_memory(job, cluster, bare(4), grid_of(ParallelConfig(dp=8, ep=1))).parts_bytes["optimizer"][0]

    assert split == pytest.approx(whole, rel=1e-12)


def test_a_tied_head_is_copied_to_the_last_stage():
    """One stage holds the table once; with more, the last holds a copy, as Megatron-LM does."""
    job = job_of("gpt-175b")
    table = job.model.embedding_parameters
    sums = [
        float(
            local_parameters(job, grid_of(ParallelConfig(pp=pp)), assign_layers(job.model, MEGATRON, pp, 1)).dense.sum()
        )
        for pp in (1, 2)
    ]

    assert job.model.tied_embeddings
    assert sums[1] - sums[0] == table


# The whole peak


@settings(max_examples=1000, deadline=None)
@given(cases())
def test_parts_sum_to_the_peak(case):
    """Every part is finite and not negative, they sum to the peak, and a grid is the sum of its single rows."""
    found = estimate_memory(case.job, case.cluster, case.runtime, case.grid)

    assert tuple(found.parts_bytes) == MEMORY_PARTS
    assert all(np.all(np.isfinite(part)) and np.all(part >= 0) for part in found.parts_bytes.values())
    assert found.peak_bytes == pytest.approx(np.sum(list(found.parts_bytes.values()), axis=0), rel=1e-12)
    for position in range(len(case.grid)):
        alone = estimate_memory(case.job, case.cluster, case.runtime, grid_of(case.grid.config(position)))
        assert alone.peak_bytes[0] == pytest.approx(found.peak_bytes[position], rel=1e-12)
        assert alone.capacity_bytes[0] == found.capacity_bytes[position]


@settings(max_examples=1000, deadline=None)
@given(cases())
def test_more_sharding_and_recomputation_never_need_more(case):
    """Training states shrink from ZeRO stage to stage; kept activations shrink with recomputation."""
    previous = np.full(len(case.grid), np.inf)
    for stage in range(4):
        grid = replace(case.grid, zero_stage=np.full(len(case.grid), stage))
        found = estimate_memory(case.job, case.cluster, case.runtime, grid)
        # the worst stage may change with the sharding, so the peaks are compared without what only stage 3 adds
        states = found.peak_bytes - found.parts_bytes["buffers"]
        assert np.all(states <= previous * (1 + 1e-12))
        previous = states + found.parts_bytes["buffers"]


@pytest.mark.parametrize(
    "config", [ParallelConfig(dp=8), ParallelConfig(pp=4, dp=2), ParallelConfig(tp=4, dp=2)], ids=str
)
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_recomputation_lowers_the_activations(name, config):
    """Full keeps less than selective, selective less than none."""
    grid = grid_of(*(replace(config, recompute=mode) for mode in ("full", "selective", "none")))

    activations = estimate_memory(job_of(name), find_cluster("dgx-h100"), MEGATRON, grid).parts_bytes["activations"]

    assert activations[0] < activations[1] < activations[2]


def test_first_stage_of_a_pipeline_is_the_fullest():
    """1F1B holds p micro-batches on the first stage: pp 4 keeps as many activations as one stage with all layers."""
    job = job_of("llama3-8b", vocab_size=128)
    cluster = find_cluster("dgx-h100")
    one, four = estimate_memory(
        job, cluster, bare(4), grid_of(ParallelConfig(dp=8), ParallelConfig(pp=4, dp=2))
    ).parts_bytes["activations"]

    assert one == pytest.approx(four)


def test_interleaving_keeps_more():
    """With vpp 2 a stage of 4 keeps 1 + 3/8 of what one stage with all layers keeps (Korthikanti 2022, 4.2.3)."""
    job = job_of("llama3-8b", vocab_size=128)
    one, interleaved = estimate_memory(
        job, find_cluster("dgx-h100"), bare(4), grid_of(ParallelConfig(dp=8), ParallelConfig(pp=4, dp=2, vpp=2))
    ).parts_bytes["activations"]

    assert interleaved == pytest.approx(one * (1 + 3 / 8))


def test_fits_leaves_the_headroom_free():
    """A peak of 92% of the device fits with a headroom of 8%, and not with 9%."""
    cluster = find_cluster("dgx-h100")
    exact = estimate_memory(job_of(), cluster, MEGATRON, grid_of(ParallelConfig(tp=8)))
    capacity = exact.capacity_bytes[0]
    full = replace(exact, peak_bytes=np.array([0.92 * capacity]))

    assert capacity == cluster.memory_bytes
    assert full.fits(0.08)[0]
    assert not full.fits(0.09)[0]


def test_the_smaller_of_two_kinds_of_devices_decides():
    """Stages on 40 GB devices must fit there, although others have 80 GB."""
    mixed = cluster_from_mapping(
        {"groups": [{"device": "A100-SXM-40", "hosts": 1}, {"device": "A100-SXM-80", "hosts": 1}]}, Path()
    )
    job = job_of("llama3-8b", vocab_size=128)

    found = estimate_memory(job, mixed, MEGATRON, grid_of(ParallelConfig(dp=16), ParallelConfig(pp=2, dp=8)))

    assert found.capacity_bytes.tolist() == [mixed.groups[0].device.memory_bytes] * 2
    assert mixed.groups[0].device.memory_bytes < 41 * 2**30
