"""What every kind of block keeps to, whichever file of the folder it is in."""

import inspect
import pkgutil
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module

import numpy as np
import pytest

import costmodels.blocks
from costmodels.blocks.attention import Attention
from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.cross_attention import CrossAttention
from costmodels.blocks.delta_attention import DeltaAttention
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.head import Head
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.lightning_attention import LightningAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.mask import Mask
from costmodels.blocks.operator import Family, OpKind, Phase
from costmodels.blocks.prediction_join import PredictionJoin
from costmodels.blocks.projection import Projection
from costmodels.blocks.registry import block_kinds
from costmodels.blocks.short_convolution import ShortConvolution
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.blocks.tally import Tally
from costmodels.blocks.tower_part import TowerPart
from costmodels.blocks.traced_part import Heads, Product, TracedExperts, TracedMixer, TracedMlp
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.operators.layer_operators import block_context
from tests.support.settings.random_settings import grid_of, job_of

H = 512
OWN = {"hidden_size": H, "norm_size": H}
HEADS = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 64}
LATENT = {"num_heads": 16, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
FEW = {"num_experts": 16, "top_k": 4, "ffn_size": 256}
PRODUCTS = (OpKind.MATMUL, OpKind.GROUPED_MATMUL)
MODULES = (("core_attn",), ("mlp",), ("moe",), ("layernorm", "moe_act", "shared_experts"), ("mla_up_proj", "core_attn"))
ROLES = {"heads", "kv_heads", "state_heads", "scanned_heads", "scanned_groups", "projection", "ffn", "experts"}
ROLES |= {"expert_ffn", "top_k"}
PLAIN = replace(find_runtime("megatron-core"), vocabulary_multiple=1)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One block, and its active parameters that no matrix product multiplies: norms, biases, tables that are read."""

    block: AbstractBlock
    vectors: int


EXAMPLES = {
    "attention": Example(block=Attention(**OWN, **HEADS), vectors=H),
    "attention with all": Example(
        block=Attention(
            **OWN, **HEADS, qkv_bias=True, output_bias=True, qk_norm_size=2 * 64, gate_size=1024, sinks=True, norms=2.0
        ),
        vectors=2 * H + (1024 + 2 * 512 + 1024) + H + 2 * 64 + 16,
    ),
    "attention whose keys are values": Example(block=Attention(**OWN, **HEADS, kv_projections=1), vectors=H),
    "attention with an earlier layer's keys": Example(block=Attention(**OWN, **HEADS, kv_projections=0), vectors=H),
    "attention to a window": Example(block=Attention(**OWN, **HEADS, mask=Mask(window=256)), vectors=H),
    "attention to chunks": Example(block=Attention(**OWN, **HEADS, mask=Mask(chunk=512), rotary=False), vectors=H),
    "attention to all": Example(block=Attention(**OWN, **HEADS, mask=Mask(causal=False)), vectors=H),
    "attention with a table of distances": Example(
        block=Attention(**OWN, **HEADS, distance_table=32 * 16, rotary=False), vectors=H + 32 * 16
    ),
    "cross attention": Example(block=CrossAttention(**OWN, **HEADS), vectors=H),
    "cross attention with biases": Example(
        block=CrossAttention(**OWN, **HEADS, bias=True), vectors=H + (1024 + 2 * 512) + H
    ),
    "latent attention": Example(block=LatentAttention(**OWN, **LATENT, q_lora_rank=128), vectors=H + 128 + 96),
    "latent attention of whole queries": Example(
        block=LatentAttention(**OWN, **LATENT, down_bias=True, output_bias=True, rotary=False),
        vectors=H + 96 + (96 + 16) + H,
    ),
    "latent attention to a window": Example(
        block=LatentAttention(**OWN, **LATENT, mask=Mask(window=256)), vectors=H + 96
    ),
    "sparse latent attention": Example(
        block=SparseLatentAttention(
            **OWN, **LATENT, q_lora_rank=128, index_heads=4, index_head_dim=32, mask=Mask(window=256)
        ),
        vectors=H + 128 + 96 + 2 * 32,
    ),
    "sparse latent attention to an earlier choice": Example(
        block=SparseLatentAttention(**OWN, **LATENT, index_heads=0, index_head_dim=32, mask=Mask(window=256)),
        vectors=H + 96,
    ),
    "delta attention": Example(
        block=DeltaAttention(**OWN, num_heads=16, head_dim=32), vectors=H + 4 * 3 * 16 * 32 + 16 * 32 + 16 + 32
    ),
    "gated delta net": Example(
        block=GatedDeltaNet(
            **OWN, num_key_heads=8, num_value_heads=16, key_head_dim=32, value_head_dim=48, conv_size=4
        ),
        vectors=H + 4 * (2 * 8 * 32 + 16 * 48) + 2 * 16 + 48,
    ),
    "lightning attention": Example(
        block=LightningAttention(**OWN, num_heads=16, head_dim=64, norms=2.0), vectors=2 * H + 16 * 64
    ),
    "mamba 1": Example(
        block=Mamba1(**OWN, inner_size=1024, state_size=16, step_rank=32, has_norms=True),
        # convolution with its bias, bias of the step sizes, decays, skips, three norms
        vectors=H + 5 * 1024 + 1024 + 16 * 1024 + 1024 + (32 + 2 * 16),
    ),
    "mamba 1 with biases": Example(
        block=Mamba1(**OWN, inner_size=1024, state_size=16, step_rank=32, conv_bias=False, proj_bias=True),
        vectors=H + 4 * 1024 + 1024 + 16 * 1024 + 1024 + (2 * 1024 + H),
    ),
    "mamba 2": Example(
        block=Mamba2(**OWN, num_heads=16, head_dim=64, num_groups=8, state_size=32, output_bias=True),
        vectors=H + 5 * (1024 + 2 * 8 * 32) + 3 * 16 + 1024 + H,
    ),
    "short convolution": Example(block=ShortConvolution(**OWN, conv_size=3), vectors=H + 3 * H),
    "short convolution with biases": Example(
        block=ShortConvolution(**OWN, conv_size=3, bias=True), vectors=H + 3 * H + 5 * H
    ),
    "dense mlp": Example(block=DenseMlp(**OWN, ffn_size=1536, gated=True), vectors=H),
    "dense mlp with biases": Example(
        block=DenseMlp(**OWN, ffn_size=1536, gated=False, bias=True, norms=2.0), vectors=2 * H + 1536 + H
    ),
    "experts": Example(block=Experts(**OWN, **FEW, gated=True), vectors=H),
    "experts beside shared ones": Example(
        block=Experts(
            **OWN, **FEW, gated=True, num_shared=2, shared_ffn_size=512, shared_gate=True, router_bias=True, norms=2.0
        ),
        vectors=2 * H + H + 16,  # the gate of shared experts is no product of its own
    ),
    "experts without gates": Example(block=Experts(**OWN, **FEW, gated=False, bias=True), vectors=H + 4 * (256 + H)),
    "experts of few tokens' parts": Example(
        block=Experts(**OWN, **FEW, gated=True, latent_size=128, idle_experts=16), vectors=H
    ),
    "embedding": Example(block=Embedding(hidden_size=H, vocab_size=8192), vectors=8192 * H),
    "embedding with positions": Example(
        block=Embedding(hidden_size=H, vocab_size=8192, learned_positions=1024), vectors=(8192 + 1024) * H
    ),
    "embedding with types and a norm": Example(
        block=Embedding(hidden_size=H, vocab_size=8192, learned_positions=512, token_types=2, norm_size=2 * H),
        vectors=(8192 + 512 + 2 + 2) * H,
    ),
    "embedding with inputs of layers": Example(
        block=Embedding(hidden_size=H, vocab_size=8192, layer_inputs=512, layer_vocab_size=1024, layer_norm_size=64),
        vectors=8192 * H + 1024 * 512 + 64,
    ),
    "head with a product before it": Example(
        block=Head(**OWN, vocab_size=8192, has_table=True, bias=True, norms=2.0, transform_size=H * H + H),
        vectors=8192 + 2 * H + H,
    ),
    "head": Example(block=Head(**OWN, vocab_size=8192, has_table=True), vectors=H),
    "tied head": Example(block=Head(**OWN, vocab_size=8192, has_table=False), vectors=H - 8192 * H),
    "projection": Example(block=Projection(inputs=768, outputs=H), vectors=0),
    "projection with all": Example(
        block=Projection(
            inputs=2048, outputs=H, bias=True, activation=True, norm_width=H, norm_size=2 * H, table=256 * H
        ),
        vectors=3 * H,
    ),
    # 2 images of 1,024 tokens are as many tokens as the job's sequences have
    "attention of a tower": Example(
        block=TowerPart(
            tower="vision",
            part=Attention(**OWN, **HEADS, mask=Mask(causal=False, chunk=64)),
            hidden_size=H,
            images=2.0,
            tokens=1024,
            trained=True,
        ),
        vectors=H,
    ),
    "projection of a tower": Example(
        block=TowerPart(
            tower="vision",
            part=Projection(inputs=1024, outputs=H),
            hidden_size=1024,
            images=8.0,
            tokens=256,
            trained=True,
        ),
        vectors=0,
    ),
    "prediction join": Example(block=PredictionJoin(**OWN), vectors=2 * H),
    "traced mixer": Example(
        block=TracedMixer(
            hidden_size=H,
            products=(Product(1.0, H, 1024), Product(1.0, H, 512), Product(1.0, 1024, H)),
            heads=(Heads(16, 8, 64, 64, Mask(window=256)),),
            moved_bytes=4096.0,
            dense_parameters=H * (1024 + 512 + 1024) + H,
        ),
        vectors=H,
    ),
    "traced scan": Example(
        block=TracedMixer(
            hidden_size=H,
            products=(Product(1.0, H, 2048), Product(1.0, 1024, H)),
            scan_flops=1e6,
            square_flops=8.0,
            dense_parameters=H * 3072 + H,
        ),
        vectors=H,
    ),
    "traced MLP": Example(
        block=TracedMlp(
            hidden_size=H, products=(Product(1.0, H, 2048), Product(1.0, 2048, H)), dense_parameters=H * 4096
        ),
        vectors=0,
    ),
    "traced experts": Example(
        block=TracedExperts(
            hidden_size=H,
            products=(Product(1.0, H, 16),),
            routed=(Product(4.0, H, 512), Product(4.0, 256, H)),
            num_experts=16,
            dense_parameters=16 * H,
            expert_parameters=16 * 3 * H * 256,
        ),
        vectors=0,
    ),
}
"""At least one block of each kind; add one here for every file that you add to the folder."""

SHAPES = grid_of(
    ParallelConfig(),
    ParallelConfig(mbs=3, recompute="selective"),
    ParallelConfig(tp=4, dp=4, ep=2, sequence_parallel=False),
    ParallelConfig(tp=8, cp=2, dp=2, ep=4, mbs=2, sequence_parallel=True),
    ParallelConfig(up=4, dp=4, ep=8, expert_tp=1),
    ParallelConfig(tp=2, cp=2, up=2, dp=2, ep=2, recompute="full", sequence_parallel=True),
)


def each_block():
    """One case for every example."""
    return pytest.mark.parametrize("block", [each.block for each in EXAMPLES.values()], ids=list(EXAMPLES))


def kinds_of_the_folder():
    """The classes of blocks in the modules of costmodels/blocks."""
    modules = [
        import_module(f"costmodels.blocks.{each.name}") for each in pkgutil.iter_modules(costmodels.blocks.__path__)
    ]
    members = {member for module in modules for _, member in inspect.getmembers(module, inspect.isclass)}
    return sorted(
        (m for m in members if issubclass(m, AbstractBlock) and not inspect.isabstract(m)), key=lambda m: m.kind
    )


def context_of(grid, runtime=PLAIN, **fields_of_job):
    """What a block is told of a job of 2,048 tokens a sequence."""
    return block_context(replace(job_of(sequence_length=2048), **fields_of_job), runtime, grid)


def operators_of(block, context):
    """The operators of a block called `own`."""
    return block.operators(OperatorBuilder(context=context, block="own", family=block.family))


def flop_of_matrices(block, grid):
    """The FLOPs of the products with weights, forward and backward on one rank, for each token of the group [2, u].

    The inputs of an indexer are detached; the gradients that it saves by that are counted here.
    """
    operators = {op.name: op for op in operators_of(block, context_of(grid))}
    weighted = [name for name in operators if f"{name}.weight_gradient" in operators]
    forward = sum((operators[name].flop for name in weighted), np.zeros(len(grid)))
    gradients = [f"{name}.{side}_gradient" for name in weighted for side in ("data", "weight")]
    detached = {f"own.core.index_{side}.data_gradient" for side in ("queries", "keys")} - set(operators)
    found = [operators[name.replace("data", "weight") if name in detached else name] for name in gradients]
    backward = sum((op.flop for op in found), np.zeros(len(grid)))
    assert all(operators[name].kind in PRODUCTS for name in weighted)
    return np.stack([forward, backward]) / (2048 * grid.mbs)


def test_every_kind_of_the_folder_has_an_example():
    """A kind that is missing here is held to nothing below; kinds have names of their own, and hashable sizes."""
    kinds = kinds_of_the_folder()

    assert {type(each.block) for each in EXAMPLES.values()} == set(kinds)
    assert {kind.kind: kind for kind in kinds} == block_kinds()
    assert len({kind.kind for kind in kinds}) == len(kinds)
    for block in (each.block for each in EXAMPLES.values()):
        assert is_dataclass(block)
        assert isinstance(block.family, Family)
        assert hash(replace(block)) == hash(block)
        assert {block, replace(block)} == {block}


@each_block()
def test_one_rank_alone_holds_all_parameters(block):
    """Without parallelism a rank holds each parameter once."""
    held = block.held(grid_of(ParallelConfig()))

    assert (held.dense + held.expert).tolist() == [block.parameters]
    assert 0 < block.active_parameters <= block.parameters


@each_block()
def test_ranks_of_tp_hold_all_parameters_and_copies(block):
    """A part of the parameters is cut evenly by tp, and the rest is copied: all ranks hold the whole, and copies."""
    tp = np.array([1, 2, 4, 8])
    held = block.held(grid_of(*(ParallelConfig(tp=degree) for degree in tp.tolist())))
    each = held.dense + held.expert

    copied = 2 * each[1] - each[0]
    cut = each[0] - copied
    assert 0 <= copied <= each[0]
    assert tp * each == pytest.approx(block.parameters + (tp - 1) * copied)
    assert each == pytest.approx(cut / tp + copied)


def test_more_ranks_than_key_heads_hold_whole_heads():
    """8 key heads on 16 ranks are one of each rank, so that keys and values are held twice over all."""
    block = EXAMPLES["attention"].block
    one, eight, sixteen = block.held(grid_of(*(ParallelConfig(tp=tp) for tp in (1, 8, 16)))).dense

    projections = one - H  # but for the norm
    keys_values = 2 * H * 8 * 64
    assert eight - H == projections / 8
    assert 16 * (sixteen - H) == projections + keys_values


@each_block()
def test_experts_are_dealt_and_cut(block):
    """The ranks of ep and expert_tp together hold every expert once, and the rest as often as there are ranks."""
    degrees = [(1, 0), (2, 0), (8, 1), (4, 2), (16, 1)]
    grid = grid_of(*(ParallelConfig(tp=2, dp=8, ep=ep, expert_tp=tp) for ep, tp in degrees))
    held, whole = block.held(grid), block.held(grid_of(ParallelConfig()))

    ranks = grid.ep * grid.expert_tensor
    assert held.expert * ranks == pytest.approx(np.broadcast_to(whole.expert, ranks.shape))
    assert np.ptp(held.dense) == 0
    if block.family is Family.EXPERTS:
        assert held.one_expert * block.num_experts / grid.ep == pytest.approx(held.expert)
    else:
        assert np.all(held.expert == 0)
        assert np.all(held.one_expert == 0)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_products_are_two_flop_per_active_parameter(example):
    """Forward, the products of a token are two FLOPs for each entry of the matrices that it visits; backward four."""
    block, one = example.block, grid_of(ParallelConfig())

    matrices = block.active_parameters - example.vectors
    assert flop_of_matrices(block, one).tolist() == [[2 * matrices], [4 * matrices]]


@each_block()
def test_splitting_creates_and_loses_no_work(block):
    """All ranks of tp, cp and up together have the FLOPs of one; of an indexer every rank of tp has all.

    A tower is whole on every rank.
    """
    degrees = ((1, 1, 1), (1, 4, 1), (1, 1, 8), (8, 1, 1), (2, 2, 2))
    grid = grid_of(*(ParallelConfig(tp=tp, cp=cp, up=up, mbs=2) for tp, cp, up in degrees))
    ranks = 1 if block.family is Family.TOWER else grid.tp * grid.cp * grid.up

    for op in operators_of(block, context_of(grid)):
        shared = grid.tp if "core.index_" in op.name else 1
        assert op.flop * ranks / shared == pytest.approx(np.full(len(grid), op.flop[0]), rel=1e-12), op.name


@each_block()
def test_operators_are_named_once_and_have_a_row_for_each_shape(block):
    """Of every kind of numerics and runtime: names, rows, and numbers that can be times."""
    for runtime in map(find_runtime, runtime_names()):
        for precision in ("bf16", "fp8"):
            context = context_of(SHAPES, runtime, precision=precision)
            operators = operators_of(block, context)
            names = [op.name for op in operators]
            assert len(set(names)) == len(names) > 0
            for op in operators:
                assert (op.block, op.family) == ("own", block.family)
                assert op.name.startswith("own.")
                assert op.shape.shape[0] == op.flop.shape[0] == op.moved_bytes.shape[0] == len(SHAPES)
                assert op.flop.ndim == op.moved_bytes.ndim == 1
                for numbers in (op.shape, op.flop, op.moved_bytes, np.asarray(op.kept_share)):
                    assert np.all(np.isfinite(numbers))
                    assert np.all(numbers >= 0)
                assert np.max(op.kept_share) <= 1
            forward = [op for op in operators if op.phase == Phase.FORWARD]
            assert sum(op.moved_bytes.min() > 0 for op in forward) > 0


@each_block()
def test_the_core_is_part_of_the_operators(block):
    """`core` returns those operators that say that they are of it, alone and in the same order.

    Mixers have one, and all of a tower is one.
    """
    context = context_of(SHAPES)
    core = block.core(OperatorBuilder(context=context, block="own", family=block.family))
    inside = [op for op in operators_of(block, context) if op.is_core]

    assert [op.name for op in core] == [op.name for op in inside]
    assert all(op.is_core for op in core)
    assert (block.family in (Family.MIXER, Family.TOWER)) == bool(core)
    for one, other in zip(core, inside, strict=True):
        assert np.array_equal(one.shape, other.shape)
        assert np.array_equal(one.moved_bytes, other.moved_bytes)


@each_block()
def test_outside_of_the_core_only_tokens_count(block):
    """However mbs, cp and up make so many tokens of a rank, all other operators are the same."""
    context = context_of(grid_of(ParallelConfig(mbs=4, cp=2, up=2), ParallelConfig(mbs=2, up=2), ParallelConfig()))

    for op in operators_of(block, context):
        if not op.is_core:
            assert np.ptp(op.shape, axis=0).max() == 0, op.name
            assert np.ptp(op.moved_bytes) == 0, op.name


@each_block()
@pytest.mark.parametrize("runtime", runtime_names())
def test_memory_is_kept_or_dropped(block, runtime):
    """No memory is negative, none is dropped that is not kept, and all has a row for each shape."""
    for modules in MODULES:
        for precision in ("bf16", "fp8"):
            context = context_of(SHAPES, find_runtime(runtime), recompute_modules=modules, precision=precision)
            memory = block.memory(Tally(context, H))
            for field in fields(memory):
                assert getattr(memory, field.name).shape == (len(SHAPES),), field.name
            assert np.all(memory.dropped >= 0)
            assert np.all(memory.dropped <= memory.kept)
            assert np.all(memory.gradient >= 0)
            assert np.all((memory.kept > 0) == (block.family not in (Family.EMBEDDING, Family.HEAD)))


@each_block()
def test_twice_the_sequences_keep_twice_the_memory(block):
    """What a micro-batch keeps grows with its rows, and nothing else."""
    one, two = (block.memory(Tally(context_of(grid_of(ParallelConfig(mbs=mbs))), H)) for mbs in (1, 2))

    assert (two.kept, two.dropped, two.gradient) == (2 * one.kept, 2 * one.dropped, 2 * one.gradient)


@each_block()
def test_exchanges_have_a_row_for_each_shape(block):
    """Mixers alone exchange over cp and up, and experts alone route."""
    moved = block.exchanges(context_of(SHAPES))

    for name in ("ring", "heads", "dealt", "routed"):
        elements = getattr(moved, name)
        if elements is not None:
            assert elements.shape == (len(SHAPES),), name
            assert np.all(elements > 0), name
            assert block.family is (Family.EXPERTS if name == "routed" else Family.MIXER)
    routes = block.family is Family.EXPERTS
    assert (moved.visits > 0) == (moved.routed_width > 0) == (moved.routed is not None) == routes


@each_block()
def test_sizes_and_caches_are_counts(block):
    """Roles are those of the contract, with sizes that can be cut; caches do not grow with the ranks of tp."""
    sizes = block.sizes()
    cached = [block.cached(tp) for tp in (1, 2, 8, 16)]

    assert set(sizes) <= ROLES
    assert all(isinstance(size, int) and size > 0 for size in sizes.values())
    assert cached == sorted(cached, reverse=True)
    assert min(cached) >= 0
    assert block.family is Family.MIXER or max(cached) == 0


@pytest.mark.parametrize("name", [name for name, each in EXAMPLES.items() if hasattr(each.block, "mask")])
def test_scores_are_those_that_the_mask_lets_through(name):
    """The core computes what `mixing_flops` says, or half of it under a causal mask, which that does not halve."""
    block = EXAMPLES[name].block
    for length in (128, 2048, 16384):
        context = block_context(job_of(sequence_length=length), PLAIN, grid_of(ParallelConfig()))
        operators = operators_of(block, context)
        weighted = {op.name.removesuffix(".weight_gradient") for op in operators if ".weight_gradient" in op.name}
        core = [op for op in operators if op.is_core and op.phase == Phase.FORWARD and op.name not in weighted]
        halved = 0.5 if block.mask.causal else 1.0
        assert sum(op.flop[0] for op in core) == pytest.approx(length * block.mixing_flops(length) * halved)
