from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.memory.activations import layer_activations
from costmodels.step.memory.peak import LEAST_CHANCE, MEMORY_PARTS, estimate_memory, stage_memory
from costmodels.step.pipeline.schedules import assign_layers
from costmodels.step.placement import local_parameters
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.model_parts import num_moe_layers
from tests.support.settings.random_settings import cases, grid_of, job_of, setting_for

MEGATRON = find_runtime("megatron-core")
BARE = replace(MEGATRON, gradient_bytes=4, memory_overhead_bytes=0, activation_slack=0.0)
"""A runtime that adds nothing to the tally."""
STATES = ("weights", "gradients", "optimizer")
HOST, HOSTS = find_cluster("dgx-h100"), find_cluster("dgx-h100", hosts=4)
LLAMA, MIXTRAL = job_of("llama3-8b"), job_of("mixtral-8x7b")
GPT = job_of("gpt-22b", sequence_length=2048)
SBH = 2048 * 6144
"""Tokens of a sequence times the hidden size."""


def estimate(job, cluster, *configs, runtime=MEGATRON, **rest):
    """The memory of a few configurations, under Megatron-Core by default."""
    return estimate_memory(setting_for(job, cluster, runtime), grid_of(*configs), **rest)


def part(name, job, cluster, *configs):
    """One part of the memory of a few configurations, under a runtime that adds nothing."""
    return estimate(job, cluster, *configs, runtime=BARE).parts_bytes[name]


def kept(job, *configs, runtime=MEGATRON, layer=0):
    """The activations that one layer keeps [n]: the first, or another by its number."""
    return layer_activations(job, runtime, grid_of(*configs)).kept[job.model.piece_of_layer[layer]]


def state_bytes_per_parameter(config: ParallelConfig, **facts) -> float:
    """Weights, gradients and optimizer states that one rank keeps per parameter of the model."""
    job, cluster = job_of("llama-7b", batch=256), find_cluster("dgx-h100", hosts=config.num_devices // 8)
    found = estimate(job, cluster, config, runtime=replace(BARE, **facts)).parts_bytes
    return sum(float(found[name][0]) for name in STATES) / job.model.num_parameters


# Activations


@pytest.mark.parametrize("mbs", [1, 4])
def test_activations_of_a_gpt_layer_are_34_sbh(mbs):
    """34 s b h less the two dropout masks, and flash attention's log-sum-exp instead of 5 a s^2 b.

    Source: Korthikanti et al. 2022, section 4.1, equation 1, whose tally has a one-byte mask of s b h after attention
    and after the MLP; models of today have no dropout.
    """
    log_sum_exp = 4 * 2048 * mbs * 64

    assert kept(GPT, ParallelConfig(mbs=mbs))[0] == (34 - 2) * SBH * mbs + log_sum_exp


@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallelism_divides_part_of_the_activations_and_sequence_parallelism_all(t):
    """10 s b h + 24 s b h / t without, 34 s b h / t with sequence parallelism (equations 2 and 4), less the masks."""
    log_sum_exp = 4 * 2048 * 64 / t

    with_sp, without = kept(GPT, ParallelConfig(tp=t), ParallelConfig(tp=t, sequence_parallel=False))

    assert with_sp == 32 * SBH / t + log_sum_exp
    assert without == (10 - 2) * SBH + 24 * SBH / t + log_sum_exp


def test_context_parallelism_divides_activations():
    """Ring attention and Ulysses both split the sequence; Ulysses keeps attention's output twice, around its exchange.

    Source of the second: transformer_engine context_parallel.py, attention with all-to-all.
    """
    whole, ring, ulysses = kept(LLAMA, ParallelConfig(), ParallelConfig(cp=8), ParallelConfig(up=8))

    assert ring == whole / 8
    assert ulysses == whole / 8 + 2 * 4096 / 8 * 4096


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_full_recomputation_keeps_the_layers_input_alone(name):
    """Kept: one hidden state. While a layer is recomputed: everything that it would have kept."""
    job = job_of(name)
    modes = grid_of(*(ParallelConfig(recompute=mode) for mode in ("none", "selective", "full")))
    found = layer_activations(job, MEGATRON, modes)

    for layer in range(job.model.num_layers):
        at = job.model.piece_of_layer[layer]
        none, selective, full = found.kept[at]
        assert full == 2 * 4096 * job.model.hidden_size
        assert full < selective < none
        assert found.working[at].tolist() == [0, none - selective, none]
    assert (found.kept[~job.model.is_layer_piece] == 0).all()


@pytest.mark.parametrize(
    ("modules", "dropped"),
    [
        (("mlp",), 2 * 4096 * 3 * 14336),
        (("layernorm",), 0),
        (("core_attn", "mlp"), 4 * 4096 * 32 + 2 * 4096 * 3 * 14336),
    ],
)
def test_selective_recomputation_drops_what_it_names(modules, dropped):
    """Of a dense layer: the MLP's inner values, attention's log-sum-exp (transformer_config.py), and nothing for norms.

    Megatron-LM itself, rehearsed with 8 layers on pp=2, tp=2, dp=2, has the same peak with `layernorm` recomputed as
    without recomputation.
    """
    job = replace(LLAMA, recompute_modules=modules)

    whole, selective = kept(job, ParallelConfig(), ParallelConfig(recompute="selective"))

    assert whole - selective == dropped


def test_torchtitans_selective_recomputation_keeps_every_second_product():
    """Kept of a dense layer: its input, q, v, attention's output and log-sum-exp, and the products by w1 and w2.

    Source: torchtitan distributed/activation_checkpoint.py, SelectiveAC; llama3-8b, one sequence of 4,096 tokens.
    """
    selective = kept(LLAMA, ParallelConfig(recompute="selective"), runtime=find_runtime("torchtitan"))[0]

    assert selective == 4096 * (2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32)


def test_experts_and_latent_attention_can_be_recomputed():
    """moe_act drops the activation's output, shared_experts theirs, mla_up_proj q, k and v, moe all but its input."""
    job = job_of("deepseek-v3")
    model, tokens = job.model, 4096
    routed = 2 * tokens * model.top_k
    shared = 2 * tokens * 3 * model.plain.shared_expert_ffn_size
    experts = routed * (model.hidden_size + 3 * model.plain.expert_ffn_size) + 8 * tokens * model.num_experts
    expected = {
        "moe_act": routed * model.plain.expert_ffn_size,
        "shared_experts": shared,
        "mla_up_proj": 2 * tokens * model.plain.num_heads * (2 * model.plain.head_dim + model.plain.v_head_dim),
        "moe": experts + shared,
    }

    for module, dropped in expected.items():
        chosen = replace(job, recompute_modules=(module,))
        whole, selective = kept(chosen, ParallelConfig(), ParallelConfig(recompute="selective"), layer=-1)
        assert whole - selective == dropped, module


@pytest.mark.parametrize(("dropout", "times"), [(True, 5), (False, 2)])
def test_unfused_attention_keeps_its_scores(dropout, times):
    """5 a s^2 b instead of the log-sum-exp: softmax, dropout mask and dropout output; without dropout the softmax.

    Source: Korthikanti et al. 2022, section 4.1.
    """
    fused, unfused = (
        kept(GPT, ParallelConfig(), runtime=replace(MEGATRON, attention_dropout=dropout, fused_attention=flash))[0]
        for flash in (True, False)
    )

    assert unfused - fused == times * 64 * 2048**2 - 4 * 2048 * 64


def test_keys_and_experts_keep_what_each_has():
    """8 instead of 32 key heads of 128 save 2 * 2 * 24 * 128 bytes per token.

    A token visits top_k experts, and each keeps its input and inner values; its weight is applied to the latter.
    """
    few, many = (kept(job_of(num_kv_heads=heads), ParallelConfig())[0] for heads in (8, 32))
    one, two = (kept(job_of("mixtral-8x7b", top_k=k), ParallelConfig())[0] for k in (1, 2))

    assert many - few == 2 * 2 * 24 * 128 * 4096
    assert two - one == 2 * 4096 * (4096 + 14336 * 3)


# Training states


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_are_those_of_zeros_first_figure(stage, gigabytes):
    """7.5 billion parameters on 64 devices, K = 12: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al. 2020, figure 1)."""
    per_parameter = state_bytes_per_parameter(ParallelConfig(dp=64, zero_stage=stage), gradient_bytes=2)

    assert per_parameter * 7.5 == pytest.approx(gigabytes, abs=0.051)


@pytest.mark.parametrize(
    ("expected", "facts", "config"),
    [
        (18, {}, ParallelConfig(dp=64, zero_stage=0)),
        (6 + 12 / 8, {}, ParallelConfig(dp=8, zero_stage=1)),
        (6 + 12 / 64, {}, ParallelConfig(dp=64, zero_stage=1)),
        (6 + 12 / 64, {}, ParallelConfig(dp=4, cp=4, up=4, zero_stage=1)),
        (16 / 8, {"fp32_weights": True}, ParallelConfig(dp=8, zero_stage=3)),
        (16 / 8, {"fp32_weights": True, "fsdp2_mixed": True}, ParallelConfig(dp=8, zero_stage=3)),
        (2 + 16 / 8, {"fp32_weights": True, "fsdp2_mixed": True}, ParallelConfig(dp=8, zero_stage=2)),
    ],
)
def test_states_are_those_of_the_documentation(expected, facts, config):
    """bf16 with fp32 gradients: 18 bytes per parameter, 6 + 12/d with the distributed optimizer over dp, cp and up.

    Sharded fp32 weights are the optimizer's copy: with gradients and two moments 16 bytes, not 18. FSDP2 that gathers
    in bf16 and keeps that until the backward pass adds 2. Sources: Megatron-LM
    docs, distributed optimizer, table of theoretical memory; torchtitan docs/fsdp.md.
    """
    assert state_bytes_per_parameter(config, **facts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("config", "saved"), [(ParallelConfig(dp=8, zero_stage=0), 2), (ParallelConfig(dp=8), 2 / 8)])
def test_shared_weights_save_the_bf16_ones_whose_states_a_rank_keeps(config, saved):
    """2 bytes per parameter, over dp with the distributed optimizer (MindSpeed docs/features/reuse-fp32-param.md)."""
    apart, shared = (
        sum(
            float(estimate(replace(LLAMA, shared_master_weights=is_shared), HOST, config).parts_bytes[name][0])
            for name in STATES
        )
        for is_shared in (False, True)
    )

    assert apart - shared == pytest.approx(saved * LLAMA.model.num_parameters)


def part_of(name, model, runtime=MEGATRON, **degrees):
    """One part of the memory of a small model on one host, without recomputation [bytes]."""
    found = estimate(replace(LLAMA, model=model), HOST, ParallelConfig(**degrees), runtime=runtime)
    return float(found.parts_bytes[name][0])


@pytest.mark.parametrize("tp", [1, 2])
def test_norms_of_queries_and_keys_keep_their_inputs(tp):
    """A layer keeps 32 queries and 8 keys of 128 values once more, as Megatron-LM does (rehearsed with
    `--qk-layernorm`: 10,240 bytes per token and layer).
    """
    plain, normed = (LLAMA.model.changed(num_layers=4, qk_norm=qk_norm) for qk_norm in (False, True))
    more = part_of("activations", normed, tp=tp, dp=8 // tp) - part_of("activations", plain, tp=tp, dp=8 // tp)

    assert more == pytest.approx(4 * LLAMA.sequence_length * 10_240 / tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_activation_of_several_kernels_keeps_both_halves(tp):
    """Megatron-LM without its fused SwiGLU keeps two tensors of the inner width more per layer (rehearsed with
    `--no-bias-swiglu-fusion`).
    """
    model, apart = LLAMA.model.changed(num_layers=4), replace(MEGATRON, fused_activation=False)
    fused, unfused = (part_of("activations", model, runtime, tp=tp, dp=8 // tp) for runtime in (MEGATRON, apart))

    assert unfused - fused == pytest.approx(4 * LLAMA.sequence_length * 2 * 14_336 * 2 / tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_head_has_an_empty_gradient_too(tp):
    """Where the product adds up the weight's gradient, Transformer Engine keeps an empty one, of 2 bytes per value."""
    small, large = (LLAMA.model.changed(num_layers=4, vocab_size=size) for size in (32_000, 64_000))
    more = part_of("buffers", large, tp=tp, dp=8 // tp) - part_of("buffers", small, tp=tp, dp=8 // tp)
    without = replace(MEGATRON, keeps_empty_gradients=False)

    assert more == pytest.approx(2 * 32_000 * 4096 / tp)
    assert len({part_of("buffers", model, without, tp=tp, dp=8 // tp) for model in (small, large)}) == 1


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (4, 8), (16, 1)])
@pytest.mark.parametrize("name", ["llama-7b", "llama2-34b", "qwen2.5-7b", "mixtral-8x7b", "llama3-8b"])
def test_ranks_together_hold_the_model(name, pp, tp):
    """Over all stages, tp times a rank's share, norms counted once, is the model's number of parameters.

    Within the final norm, which is left out, and Qwen2's biases of the keys' projections: less than 1e-5 of the model.
    """
    model = find_model(name)
    tp = min(tp, model.plain.num_kv_heads)

    local = local_parameters(job_of(name), grid_of(ParallelConfig(pp=pp, tp=tp)), pieces_of(model, pp))

    norms = model.plain.norms_per_layer * model.plain.norm_size
    routers = num_moe_layers(model) * model.experts.router_parameters if model.is_moe else 0
    copies = (tp - 1) * (model.num_layers * norms + routers)
    total = tp * (local.dense.sum() + local.expert.sum()) - copies
    assert total == pytest.approx(model.num_parameters, rel=1e-5)


def pieces_of(model, pp):
    """The layers and ends of each stage."""
    return assign_layers(model, MEGATRON, pp, 1).held


def test_experts_are_divided_by_ep_and_tp():
    """8 experts on ep 4 leave 2 to a rank; what is no expert stays whole."""
    model, pieces = MIXTRAL.model, pieces_of(MIXTRAL.model, 1)
    whole, split = (local_parameters(MIXTRAL, grid_of(ParallelConfig(tp=2, dp=4, ep=ep)), pieces) for ep in (1, 4))

    assert split.expert[0, 0] == whole.expert[0, 0] / 4
    assert whole.expert[0, 0] == 32 * 8 * model.experts.expert_parameters / 2
    assert split.dense[0, 0] == whole.dense[0, 0]


def test_states_of_experts_are_sharded_over_their_own_replicas():
    """With ep = dp an expert has one copy, so its states are not sharded further; with dp 16 in shards of 4, four.

    Split by tp or dealt whole to twice the ranks, a rank's experts weigh the same; not split at all, twice that.
    """
    two_hosts = find_cluster("dgx-h100", hosts=2)
    alone, dealt = part("optimizer", MIXTRAL, HOST, ParallelConfig(dp=8, ep=8), ParallelConfig(dp=8))
    plain, shards = (ParallelConfig(dp=16, ep=4, dp_shard=shard) for shard in (0, 4))
    all_of_dp, of_shards = part("optimizer", MIXTRAL, two_hosts, plain, shards)
    degrees = [ParallelConfig(tp=2, dp=4, ep=ep, expert_tp=tp) for ep, tp in ((4, 0), (8, 1), (4, 1))]
    split, spread, whole = part("weights", MIXTRAL, HOST, *degrees)

    assert alone == pytest.approx(dealt, rel=1e-12)
    assert of_shards == pytest.approx(4 * all_of_dp)
    assert spread == split
    assert whole - split == pytest.approx(2 * MIXTRAL.model.experts.expert_parameters * MIXTRAL.model.num_layers)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_over_a_part_of_dp_need_a_middle(stage):
    """States in shards of 8 stand between those over all of dp and copies everywhere, which shards of 1 are."""
    shards = [ParallelConfig(dp=32, zero_stage=stage, dp_shard=shard) for shard in (0, 32, 8, 2, 1)]

    found = estimate(job_of(batch=256), HOSTS, *shards, ParallelConfig(dp=32, zero_stage=0), runtime=BARE).parts_bytes

    states = sum(found[name] for name in STATES)
    assert states[0] == states[1] < states[2] < states[3] < states[4] == states[5]
    assert found["optimizer"][2] == pytest.approx(4 * found["optimizer"][0])


def test_a_tied_head_is_copied_to_the_last_stage():
    """One stage holds the table once; with more, the last holds a copy, as Megatron-LM does."""
    job = job_of("gpt-175b")
    one, two = (
        local_parameters(job, grid_of(ParallelConfig(pp=pp)), pieces_of(job.model, pp)).dense.sum() for pp in (1, 2)
    )

    assert job.model.tied_embeddings
    assert two - one == job.model.embedding.table


# The whole peak


@given(cases())
def test_parts_sum_to_the_peak(case):
    """Every part is finite and not negative, they sum to the peak, and a grid is the sum of its single rows."""
    found = estimate_memory(case.setting, case.grid)

    assert tuple(found.parts_bytes) == MEMORY_PARTS
    assert all(np.all(np.isfinite(part)) and np.all(part >= 0) for part in found.parts_bytes.values())
    assert found.peak_bytes == pytest.approx(np.sum(list(found.parts_bytes.values()), axis=0), rel=1e-12)
    for position in range(len(case.grid)):
        alone = estimate_memory(case.setting, grid_of(case.grid.config(position)))
        assert alone.peak_bytes[0] == pytest.approx(found.peak_bytes[position], rel=1e-12)
        assert alone.capacity_bytes[0] == found.capacity_bytes[position]


@settings(max_examples=40)
@given(cases())
def test_more_sharding_never_needs_more(case):
    """Training states shrink from ZeRO stage to stage."""
    previous = np.full(len(case.grid), np.inf)
    for stage in range(4):
        grid = replace(case.grid, zero_stage=np.full(len(case.grid), stage))
        found = estimate_memory(case.setting, grid)
        # the worst stage may change with the sharding, so the peaks are compared without what only stage 3 adds
        states = found.peak_bytes - found.parts_bytes["buffers"]
        assert np.all(states <= previous * (1 + 1e-12))
        previous = states + found.parts_bytes["buffers"]


def test_first_stage_of_a_pipeline_is_the_fullest():
    """1F1B holds p micro-batches on the first stage: pp 4 keeps as many activations as one stage with all layers.

    With vpp 2 a stage of 4 keeps 1 + 3/8 of that (Korthikanti 2022, 4.2.3).
    """
    pipelines = (ParallelConfig(pp=4, dp=2, vpp=vpp) for vpp in (1, 2))
    one, four, interleaved = part("activations", job_of(vocab_size=128), HOST, ParallelConfig(dp=8), *pipelines)

    assert one == pytest.approx(four)
    assert interleaved == pytest.approx(one * (1 + 3 / 8))


def test_fits_leaves_the_headroom_free():
    """A peak of 92% of the device fits with a headroom of 8%, and not with 9%. Fragmentation counts."""
    exact = estimate(LLAMA, HOST, ParallelConfig(tp=8))
    full = replace(exact, peak_bytes=0.92 * exact.capacity_bytes)
    lean, wasteful = (
        estimate(LLAMA, HOST, ParallelConfig(tp=8), runtime=replace(MEGATRON, activation_slack=slack))
        for slack in (0.0, 0.5)
    )

    assert exact.capacity_bytes[0] == HOST.memory_bytes
    assert full.fits(0.08 - 1e-12)[0]
    assert not full.fits(0.09)[0]
    assert wasteful.needed_bytes[0] - lean.needed_bytes[0] == wasteful.parts_bytes["fragmentation"][0] > 0


def test_what_a_peak_counts():
    """Allocated leaves out fragmentation and overhead, reserved overhead alone, and the device holds all of them."""
    found = estimate(LLAMA, HOST, ParallelConfig(tp=8))
    allocated, reserved, device = (found.peak_as(meaning)[0] for meaning in ("allocated", "reserved", "device"))

    assert device == found.peak_bytes[0]
    assert device - reserved == pytest.approx(MEGATRON.memory_overhead_bytes)
    assert reserved - allocated == pytest.approx(found.parts_bytes["fragmentation"][0])


def test_the_probability_of_fit_is_that_of_a_lognormal_error():
    """Where the error is normal, a need of exactly the device fits with 50%, one log error below it with 84%."""
    found = estimate(LLAMA, HOST, *[ParallelConfig(tp=8)] * 4)
    needed = found.capacity_bytes * np.exp([0.0, -0.1, 0.1, 0.13])
    at = replace(found, peak_bytes=needed)
    error = MemoryErrorModel(scale=0.1)

    assert at.probability_of_fit(0.0, error) == pytest.approx([0.5, 0.8413, 0.1587, 0.0968], abs=1e-4)
    assert at.may_fit(0.0, error).tolist() == [True, True, True, False]
    assert at.probability_of_fit(0.1, error)[0] < 0.5 < 1 - LEAST_CHANCE


def test_a_pass_ends_with_the_embeddings_gradient():
    """The first stage of two holds the table's gradient where that exceeds what its last micro-batch released."""
    job, runtime = replace(LLAMA, sequence_length=16), replace(BARE, fused_accumulation=False)
    found = estimate(job, HOST, ParallelConfig(pp=2, dp=4), runtime=runtime, stage="first")
    hidden = 2 * 16 * 4096

    assert found.parts_bytes["buffers"][0] == runtime.workspace_bytes + hidden + 2 * job.model.embedding.table


# Published peaks

LLAMA3_70B_12 = find_model("llama3-70b").changed(num_layers=12)
LLAMA3_405B_4 = find_model("llama3-405b").changed(num_layers=4, num_kv_heads=16)
DEEPSEEK_V3_4 = find_model("deepseek-v3").changed(num_layers=4, num_dense_layers=1, num_mtp_layers=0)


@pytest.mark.parametrize(
    ("model", "length", "config", "mebibytes"),
    [
        (LLAMA3_70B_12, 4096, ParallelConfig(pp=2, dp=4, sequence_parallel=False), 68149),
        (LLAMA3_70B_12, 4096, ParallelConfig(tp=8), 28965),
        (LLAMA3_405B_4, 4096, ParallelConfig(pp=2, dp=4, sequence_parallel=False), 89173),
        (LLAMA3_405B_4, 4096, ParallelConfig(tp=4, dp=2), 54158),
        (LLAMA3_70B_12, 131072, ParallelConfig(tp=2, up=4), 115372),
        (LLAMA3_405B_4, 32768, ParallelConfig(up=8, sequence_parallel=False), 142558),
        (DEEPSEEK_V3_4, 4096, ParallelConfig(dp=8, ep=8, sequence_parallel=False), 106804),
        (DEEPSEEK_V3_4, 4096, ParallelConfig(pp=2, dp=4, ep=4, sequence_parallel=False), 116738),
    ],
)
def test_measured_on_b200(model, length, config, mebibytes):
    """Within 1%: torch's max allocated on 8 B200, of Megatron-Core before 0.14 with Transformer Engine's cross entropy.

    Source: MooreThreads/SimuMax (Apache-2.0), measured B200 cases with four micro-batches.
    """
    cluster = cluster_from_mapping({"device": "B200", "hosts": 1}, Path())
    job = TrainingJob(model=model, sequence_length=length, global_batch_size=4 * config.dp)
    runtime = replace(MEGATRON, fused_cross_entropy=True, keeps_empty_gradients="layers")

    found = estimate(job, cluster, config, runtime=runtime)

    assert found.peak_as("allocated")[0] / 2**20 == pytest.approx(mebibytes, rel=0.01)
    assert found.fits(0.0)[0]


@pytest.mark.parametrize(
    ("config", "facts", "gibibytes"),
    [
        (ParallelConfig(dp=8, sequence_parallel=False), {}, 2.526),
        (ParallelConfig(dp=8, sequence_parallel=False), {"fused_attention": False}, 4.379),
        (ParallelConfig(pp=2, dp=4, zero_stage=0, sequence_parallel=False), {}, 2.417),
        (ParallelConfig(pp=4, dp=2, zero_stage=0, sequence_parallel=False), {}, 2.045),
        (ParallelConfig(pp=4, dp=2, zero_stage=0, sequence_parallel=False), {"fused_attention": False}, 2.499),
        (ParallelConfig(pp=2, tp=2, dp=2, zero_stage=0, sequence_parallel=False), {"copies_softmax": True}, 1.7114),
    ],
)
def test_measured_by_megatrons_functional_tests(config, facts, gibibytes):
    """Within 4%: max allocated of the last stage, GPT of 12 layers of 512 with dropout, micro-batches of 4 x 1,024.

    Source: Megatron-LM tests/functional_tests/test_cases/gpt, golden mem-max-allocated-bytes (A100, H100 and GB200).
    """
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "learned_positions": 1024}
    no_biases = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), False)
    model = find_model("gpt-22b").changed(num_layers=12, hidden_size=512, ffn_size=2048, **heads, **no_biases)
    job = TrainingJob(model=model, sequence_length=1024, global_batch_size=32)
    runtime = replace(MEGATRON, **{"fused_accumulation": False, "attention_dropout": True} | facts)

    found = estimate(job, find_cluster("dgx-a100"), replace(config, mbs=4), runtime=runtime, stage="last")

    assert found.peak_as("allocated")[0] / 2**30 == pytest.approx(gibibytes, rel=0.04)


@pytest.mark.parametrize(
    ("config", "gibibytes"),
    [
        (ParallelConfig(pp=4, dp=2, sequence_parallel=False), 63.1),
        (ParallelConfig(tp=8), 24.4),
        (ParallelConfig(pp=4, tp=2, zero_stage=0), 40.9),
        (ParallelConfig(pp=2, tp=4), 30.8),
        (ParallelConfig(pp=8, sequence_parallel=False), 62.5),
        (ParallelConfig(tp=4, dp=2, zero_stage=0), 51.4),
    ],
)
def test_measured_by_the_ultra_scale_playbook(config, gibibytes):
    """Within 11%: nanotron's peak of a LLaMA 8B on 8 H100, batches of 256 sequences of 4,096 tokens.

    Source: nanotron/ultrascale-playbook (Apache-2.0), interactive benchmarks.
    """
    changes = {"vocab_size": 131072, "tied_embeddings": True, "num_kv_heads": 32}
    model = find_model("llama3-8b").changed(source="nanotron scripts/scaling_benchmarks.py", **changes)
    job = TrainingJob(model=model, sequence_length=4096, global_batch_size=256)

    found = estimate(job, HOST, config, runtime=find_runtime("nanotron"))

    assert found.peak_as("reserved")[0] / 2**30 == pytest.approx(gibibytes, rel=0.11)
    assert found.fits(0.0)[0]


def test_each_stage_must_fit_its_own_devices():
    """Stages on 40 GB devices must fit there, although others have 80 GB.

    The first stage holds the most micro-batches: on the larger devices it fits, on the smaller ones it does not.
    """
    large, small = ({"device": name, "hosts": 1} for name in ("A100-SXM-80", "A100-SXM-40"))
    large_first, small_first = (
        cluster_from_mapping({"groups": pair}, Path()) for pair in ([large, small], [small, large])
    )
    job, config = job_of(vocab_size=128), ParallelConfig(pp=2, tp=8, mbs=16)
    capacity = estimate(job, small_first, ParallelConfig(dp=16), ParallelConfig(pp=2, dp=8)).capacity_bytes

    assert capacity.tolist() == [small_first.groups[0].device.memory_bytes] * 2
    assert capacity[0] < 41 * 2**30
    assert estimate(job, large_first, config).fits(0.0)[0]
    assert not estimate(job, small_first, config).fits(0.0)[0]


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_the_fullest_stage_is_the_one_that_decides(name):
    """Told stage by stage, the one that is fullest relative to its devices has the peak that is told of the whole."""
    job, cluster = job_of(name, batch=256), HOSTS
    pipelines = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1))
    configs = [ParallelConfig(pp=pp, tp=4, dp=8 // pp, vpp=vpp) for pp, vpp in pipelines]
    whole = estimate(job, cluster, *configs)

    for at, config in enumerate(configs):
        found = stage_memory(setting_for(job, cluster), config)
        fullest = int(np.argmax(found.peak_bytes / found.capacity_bytes))

        assert len(found.peak_bytes) == config.pp
        assert found.peak_bytes[fullest] == pytest.approx(whole.peak_bytes[at])
        assert found.capacity_bytes[fullest] == whole.capacity_bytes[at]
        assert {part: sizes[fullest] for part, sizes in found.parts_bytes.items()} == pytest.approx(
            {part: sizes[at] for part, sizes in whole.parts_bytes.items()}
        )
