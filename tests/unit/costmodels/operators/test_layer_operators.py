from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from costmodels.blocks.head import local_vocabulary
from costmodels.blocks.operator import Family, OpKind, Phase
from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.parallel_config import RECOMPUTE_MODES, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import (
    SHAPE_DIMENSIONS,
    block_context,
    core_operators,
    recomputed_share,
    step_operators,
    unique_shapes,
    unique_tokens,
)
from tests.support.settings.model_parts import times_of_blocks
from tests.support.settings.random_settings import cases, grid_of, job_of

MEGATRON = find_runtime("megatron-core")
UNPADDED = replace(MEGATRON, vocabulary_multiple=1)
PRODUCTS = (OpKind.MATMUL, OpKind.GROUPED_MATMUL)


def flop_of_a_micro_batch(job: TrainingJob, config: ParallelConfig, kinds) -> float:
    """FLOPs of both passes on one rank that holds all layers, without recomputation."""
    counts = times_of_blocks(job.model)
    operators = step_operators(job, UNPADDED, grid_of(config))
    return sum(counts[op.block] * float(op.flop[0]) for op in operators if op.kind in kinds)


@pytest.mark.parametrize("name", model_names())
def test_products_are_six_flop_per_parameter_and_token(name):
    """Matrix products forward and backward make the 6 N of `model_flops_per_token`, less norms, biases and tables.

    Norms and biases are parameters that no matrix product sees: below 0.2% of every catalog model. Without biases, what
    is left of 6 N are the norms, to the last FLOP. The attention core counts half of the convention's scores, and 2.5
    times the forward in backward: 3.5/6 of it.
    """
    job = job_of(name, sequence_length=2048)
    model = job.model

    flop = flop_of_a_micro_batch(job, ParallelConfig(), PRODUCTS)

    layers = model.num_layers + model.num_mtp_layers
    attention = 6 * layers * 2048 * model.plain.num_heads * (model.plain.head_dim + model.plain.value_head_dim)
    expected = 2048 * (model.model_flops_per_token(2048) - attention)
    assert flop == pytest.approx(expected, rel=2e-3)
    assert flop <= expected
    assert flop_of_a_micro_batch(job, ParallelConfig(), (OpKind.ATTENTION,)) == pytest.approx(
        2048 * attention * 3.5 / 6
    )
    if name in ("llama-7b", "llama3-8b", "mixtral-8x7b"):
        norms = (2 * model.num_layers + 1) * model.hidden_size
        assert flop == 6 * 2048 * (model.num_active_parameters - model.embedding.table - norms)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "gpt-175b"])
def test_splitting_creates_and_loses_no_work(name):
    """tp, cp and up divide the FLOPs of a micro-batch by their product; nothing is computed twice."""
    job, kinds = job_of(name), (*PRODUCTS, OpKind.ATTENTION)
    whole = flop_of_a_micro_batch(job, ParallelConfig(), kinds)

    for tp, cp, up in ((4, 1, 2), (1, 8, 1), (1, 2, 4), (2, 4, 2)):
        share = flop_of_a_micro_batch(job, ParallelConfig(tp=tp, cp=cp, up=up), kinds)
        assert share * tp * cp * up == pytest.approx(whole, rel=1e-12)


def test_router_is_computed_by_every_tp_rank_without_sequence_parallelism():
    """Without it each tp rank routes all tokens: the only product that tp then does not divide."""
    job = job_of("mixtral-8x7b")
    router = 6 * 4096 * job.model.num_layers * job.model.hidden_size * job.model.num_experts

    whole = flop_of_a_micro_batch(job, ParallelConfig(), PRODUCTS)
    share = flop_of_a_micro_batch(job, ParallelConfig(tp=8, sequence_parallel=False), PRODUCTS)

    assert share * 8 - whole == pytest.approx(7 * router)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "gpt-175b", "deepseek-v3"])
def test_work_is_linear_in_the_micro_batch(name):
    """Twice the sequences are twice the FLOPs and twice the routed tokens; in fp32 twice the bytes move."""
    job = job_of(name)
    one, two = (step_operators(job, MEGATRON, grid_of(ParallelConfig(mbs=mbs))) for mbs in (1, 2))
    wide = step_operators(replace(job, precision="fp32"), MEGATRON, grid_of(ParallelConfig()))

    for single, double, full in zip(one, two, wide, strict=True):
        assert single.name == double.name
        assert double.flop[0] == 2 * single.flop[0]
        assert single.moved_bytes[0] < double.moved_bytes[0] <= 2 * single.moved_bytes[0]
        assert full.moved_bytes[0] == 2 * single.moved_bytes[0]


@pytest.mark.parametrize("name", model_names())
def test_every_forward_operator_has_a_backward_one(name):
    """A matrix product has two of as many FLOPs in its backward pass; everything else has one gradient."""
    operators = step_operators(job_of(name), MEGATRON, grid_of(ParallelConfig()))
    by_name = {op.name: op for op in operators}

    assert len(by_name) == len(operators)
    for op in operators:
        if op.phase == Phase.FORWARD and op.kind in PRODUCTS:
            assert by_name[f"{op.name}.data_gradient"].flop == by_name[f"{op.name}.weight_gradient"].flop == op.flop
        elif op.phase == Phase.FORWARD:
            assert by_name[f"{op.name}.gradient"].phase == Phase.BACKWARD
    assert {op.block for op in operators} == set(find_model(name).block_names)


def test_multi_head_latent_attention_projects_down_and_up():
    """DeepSeek-V3 has four projections before its core, with the ranks of its paper in their shapes."""
    shapes = {
        op.name: op.shape[0].tolist()
        for op in step_operators(job_of("deepseek-v3"), MEGATRON, grid_of(ParallelConfig()))
    }

    assert shapes["attention.q_down"] == [4096, 7168, 1536]
    assert shapes["attention.q_up"] == [4096, 1536, 128 * 192]
    assert shapes["attention.kv_down"] == [4096, 7168, 512 + 64]
    assert shapes["attention.kv_up"] == [4096, 512, 128 * (128 + 128)]
    assert shapes["attention.proj"] == [4096, 128 * 128, 7168]


def test_key_heads_are_copied_where_tp_or_ulysses_needs_more():
    """8 key heads on tp 16 are one per rank, not half a head; 2 of a rank are 4 before 4 Ulysses ranks share them.

    They are 6 before 3 ranks do; latent attention has one per query.
    """
    job, latent = job_of("llama3-8b"), job_of("deepseek-v3")
    by_tp = grid_of(*(ParallelConfig(tp=tp) for tp in (1, 2, 8, 16)))
    by_up = grid_of(*(ParallelConfig(tp=4, up=up) for up in (1, 2, 3, 4)))

    def keys(job, grid, sent):
        """Key elements of a token that the ring sends, or that Ulysses sends beside the queries."""
        context, mixer = block_context(job, MEGATRON, grid), job.model.layers[0][0]
        moved = mixer.exchanges(context)
        if sent == "ring":
            return (moved.ring / (2 * context.tokens)).tolist()
        return np.rint(moved.heads / (2 * context.tokens) - mixer.q_size / grid.tp).tolist()

    assert job.model.layers[0][0].local_kv(by_tp).tolist() == [1024, 512, 128, 128]
    assert keys(job, by_tp, "ring") == keys(job, by_tp, "heads") == [1024, 512, 128, 128]
    assert keys(job, by_up, "ring") == keys(job, by_up, "heads") == [256, 256, 768, 512]
    # latent attention: keys of 192 elements and values of 128 for each of 128 heads, over tp alone
    assert keys(latent, by_up, "ring") == 4 * [128 * 128 / 4]
    assert keys(latent, by_up, "heads") == 4 * [128 * 128 / 4]


def test_recomputation_repeats_what_korthikanti_says():
    """Full repeats every forward operator of the layers, selective the attention core alone, none nothing."""
    shapes = grid_of(*(ParallelConfig(recompute=mode) for mode in RECOMPUTE_MODES))

    job = job_of("mixtral-8x7b")

    for op in step_operators(job, MEGATRON, shapes):
        none, selective, full = recomputed_share(job, MEGATRON, op, shapes).tolist()
        assert not none
        assert selective == (op.name == "attention.core")
        assert full == (op.phase == Phase.FORWARD and op.family not in (Family.EMBEDDING, Family.HEAD))


def test_a_ring_merges_its_partial_results():
    """Of 4 steps, 3 merge over three quarters of 2,048 queries: 10 bytes an element forward, 6 a gradient backward."""
    job = job_of("llama3-8b")
    shapes = grid_of(ParallelConfig(tp=8), ParallelConfig(tp=8, cp=4))
    forward, backward = (op for op in step_operators(job, MEGATRON, shapes) if "merge" in op.name)

    positions = 0.75 * 3 * job.sequence_length / 4

    # tp leaves 4 heads of 128 elements, with one head of keys and one of values
    assert forward.moved_bytes.tolist() == [0, 10 * positions * 512]
    assert backward.moved_bytes.tolist() == [0, 6 * positions * (512 + 256)]


@given(cases(max_configs=30))
def test_operators_stand_for_all_of_their_shape(case):
    """Unique shapes, no row twice, give back every configuration's; every operator is finite and does some work.

    However mbs, cp and up make so many tokens, only the attention core sees a difference. Only rings merge.
    """
    shapes, index = unique_shapes(case.grid)
    tokens, row = unique_tokens(case.job, shapes)
    of_shapes = step_operators(case.job, case.runtime, shapes)

    assert np.array_equal(shapes.matrix(SHAPE_DIMENSIONS)[index], case.grid.matrix(SHAPE_DIMENSIONS))
    assert len(np.unique(shapes.matrix(SHAPE_DIMENSIONS), axis=0)) == len(shapes)
    for op in of_shapes:
        runs = np.full(len(shapes), True) if "merge" not in op.name else shapes.cp > 1
        assert len(op.shape) == len(op.flop) == len(op.moved_bytes) == len(shapes)
        assert np.all(np.isfinite(op.shape) & (op.shape > 0) == runs[:, None])
        assert np.all((op.flop >= 0) & (op.moved_bytes >= runs))
    outside = [op for op in step_operators(case.job, case.runtime, tokens) if not op.is_core]
    for op, of_tokens in zip([op for op in of_shapes if not op.is_core], outside, strict=True):
        assert np.array_equal(op.shape, of_tokens.shape[row])
        assert np.array_equal(op.moved_bytes, of_tokens.moved_bytes[row])
    core = [op.name for op in of_shapes if op.is_core]
    assert core == [op.name for op in core_operators(case.job, case.runtime, shapes)]


@pytest.mark.parametrize(
    ("model", "modules", "expected"),
    [
        ("llama3-8b", ("core_attn",), {"attention.core"}),
        ("llama3-8b", ("mlp",), {"dense_mlp.up", "dense_mlp.activation", "dense_mlp.down"}),
        ("llama3-8b", ("layernorm",), set()),  # fused with the products behind them
        ("mixtral-8x7b", ("layernorm",), {"moe_mlp.norm"}),
        ("mixtral-8x7b", ("moe_act",), {"moe_mlp.activation"}),
        ("deepseek-v3", ("mla_up_proj",), {"attention.q_up", "attention.kv_up"}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_selective_recomputation_repeats_the_modules_that_the_job_names(model, modules, expected):
    """Megatron-Core's recompute_modules name the operators that run again, and no others."""
    job = replace(job_of(model), recompute_modules=modules)
    shapes = grid_of(ParallelConfig(recompute="selective"))

    again = {op.name for op in step_operators(job, MEGATRON, shapes) if recomputed_share(job, MEGATRON, op, shapes)[0]}

    assert again == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # of q, k, v (4,096 + 2 * 1,024) the keys; the projection; one of w1 and w3; not w2
        ("llama3-8b", {"attention.qkv": 1 / 6, "attention.proj": 1, "dense_mlp.up": 0.5, "dense_mlp.down": 0}),
        # keys as wide as queries; of up and down the sixth product
        ("gpt-22b", {"attention.qkv": 1 / 3, "attention.proj": 1, "dense_mlp.up": 0, "dense_mlp.down": 1}),
        ("mixtral-8x7b", {"moe_mlp.up": 1, "moe_mlp.down": 1, "moe_mlp.router": 1}),
    ],
)
def test_selective_recomputation_may_keep_every_second_product(model, expected):
    """Torchtitan's SelectiveAC keeps attention and the 1st, 3rd, ... product of a layer; all else runs again."""
    job, titan = job_of(model), find_runtime("torchtitan")
    shapes = grid_of(ParallelConfig(recompute="selective"))

    share = {op.name: recomputed_share(job, titan, op, shapes)[0] for op in step_operators(job, titan, shapes)}

    assert {name: share[name] for name in expected} == pytest.approx(expected)
    assert share["attention.core"] == 0
    assert share["attention.norm"] == share["attention.rotary" if model == "llama3-8b" else "attention.norm"] == 1


def test_unfused_attention_passes_its_scores_through_memory():
    """Without a flash kernel the core computes the whole square, its backward pass twice that, and moves the scores.

    Source: Korthikanti et al. 2022, section 4.1.
    """
    job = job_of("gpt-22b", sequence_length=2048)
    unfused = replace(UNPADDED, fused_attention=False)
    square = 2 * job.model.plain.num_heads * 2048**2 * 2 * job.model.plain.head_dim

    operators = step_operators(job, unfused, grid_of(ParallelConfig()))
    core = [op for op in operators if op.name.startswith("attention.core")]

    flop = {phase: sum(float(op.flop[0]) for op in core if op.phase == phase) for phase in Phase}
    assert flop == {Phase.FORWARD: square, Phase.BACKWARD: 2 * square}
    softmax = next(op for op in core if op.name == "attention.core.softmax")
    assert softmax.moved_bytes[0] >= 2 * 2 * job.model.plain.num_heads * 2048**2


def test_narrow_products_cast_their_operands():
    """An fp8 job reads every product's input once more to cast it, and none of the head's or of attention's."""
    job = replace(job_of("mixtral-8x7b"), precision="fp8")
    operators = step_operators(job, MEGATRON, grid_of(ParallelConfig()))
    casts = {op.name for op in operators if ".cast_" in op.name}
    wide = {op.name for op in operators if op.precision == "bf16"}
    forward = [op for op in operators if op.kind in PRODUCTS and op.phase == Phase.FORWARD]
    narrow = {op.name for op in forward if op.precision == "fp8"}

    assert casts == {f"{name}.cast_{role}" for name in narrow for role in ("input", "gradient")}
    assert wide >= {"attention.core", "head.logits", "moe_mlp.router"}
    unchanged = step_operators(job_of("mixtral-8x7b"), MEGATRON, grid_of(ParallelConfig()))
    assert not any(".cast_" in op.name for op in unchanged)


def test_experts_keep_their_tokens_and_share_their_weights():
    """With ep a rank keeps its FLOPs (tokens come and go) and reads a share of the weights.

    Whether experts are split by tp or dealt whole to as many ranks more, a rank has as many FLOPs and weights.
    """
    job = job_of("mixtral-8x7b")
    one, dealt, split, whole = (
        {op.name: op for op in step_operators(job, MEGATRON, grid_of(config))}
        for config in (
            ParallelConfig(dp=8),
            ParallelConfig(dp=8, ep=8),
            ParallelConfig(tp=2, dp=4, ep=4),
            ParallelConfig(tp=2, dp=4, ep=8, expert_tp=1),
        )
    )

    up = "moe_mlp.up"
    assert dealt[up].flop == one[up].flop
    weights = 2 * 7 * job.model.hidden_size * job.model.plain.expert_ffn_size * 2
    assert one[up].moved_bytes[0] - dealt[up].moved_bytes[0] == weights
    assert dealt[up].shape.tolist() == [[1, 2 * 4096, 4096, 2 * 14336]]
    for name in (up, "moe_mlp.down.weight_gradient"):
        assert whole[name].flop[0] == split[name].flop[0]
    assert split[up].shape.tolist() == [[2, 2 * 4096, 4096, 14336]]
    assert whole[up].shape.tolist() == [[1, 4096, 4096, 2 * 14336]]


def test_the_vocabulary_is_padded_on_every_tp_rank():
    """Megatron pads 50,257 tokens to a multiple of 128 on each rank: 50,304 rows on one rank, 25,216 on each of two."""
    job = job_of("gpt-22b", vocab_size=50257)
    grid = grid_of(*(ParallelConfig(tp=tp) for tp in (1, 2, 8)))

    padding = replace(MEGATRON, vocabulary_multiple=128, pads_whole_vocabulary=True)
    padded, plain = (local_vocabulary(50257, block_context(job, facts, grid)) for facts in (padding, UNPADDED))

    assert padded.tolist() == [50304, 25216, 6400]
    assert plain.tolist()[0] == 50257
