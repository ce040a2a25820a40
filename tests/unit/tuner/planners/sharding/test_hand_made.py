"""Megatron's plan for a candidate's degrees: what its layers send, and beside it what the cost model says they do."""

import math
from collections import Counter
from dataclasses import asdict, replace
from fnmatch import fnmatch

import pytest

from costmodels.blocks.attention import Attention
from costmodels.blocks.experts import Experts
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.operator import LAYER_FAMILIES, OpKind, Phase
from costmodels.blocks.recurrent_mixer import RecurrentMixer
from costmodels.blocks.sparse_latent_attention import INDEX_BYTES, SparseLatentAttention
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import with_layers
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import step_operators
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.plan import NONE, cost_of, violations
from costmodels.step.communication import layer_collectives, layer_uses
from costmodels.step.placement import place
from hardware.cluster_file import find_cluster
from tests.support.graphs.kinds_of_blocks import KINDS, model_of
from tuner.planners.sharding.hand_made import hand_made
from tuner.planners.sharding.layer_axes import layer_axes

TOKENS, BYTES = 2048, 2
CLUSTER = find_cluster("dgx-h100", hosts=4)
HIDDEN, KEYS = 4096, 1024
"""Elements of a token of llama3-8b, and of its keys: 8 heads of 128."""


def job_of(model, layers=2):
    """A few layers of a catalog model."""
    return TrainingJob(
        model=with_layers(find_model(model), layers), sequence_length=TOKENS, global_batch_size=64, zero_stage=1
    )


def planned(model, layers=2, **degrees):
    """The plan by hand of a candidate with these degrees; None where there is none."""
    return planned_job(job_of(model, layers), **degrees)


def planned_job(job, **degrees):
    """The plan by hand of a job's layers."""
    config = ParallelConfig(**degrees)
    axes = layer_axes(config)
    assert axes
    graph = transformer_graph(job, micro_batch_size=config.mbs * axes.get("dp", 1))
    mesh = DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=CLUSTER)
    plan = hand_made(graph, mesh, config)
    assert plan is None or violations(plan) == ()
    return plan


def collectives_of(plan, number):
    """What operators of a layer send of activations: (operator, collective)."""
    graph, prefix = plan.graph, f"layers.{number}."
    return [
        (graph.ops[each.op].name.removeprefix(prefix), each)
        for each in cost_of(plan).collectives
        if graph.ops[each.op].name.startswith(prefix) and graph.tensors[each.tensor].kind is TensorKind.ACTIVATION
    ]


def of_layer(plan, number, block="*"):
    """These, sorted: (kind, axes, tensor, elements of the message for each token of a sequence)."""
    found = []
    for name, each in collectives_of(plan, number):
        if fnmatch(name, f"{block}.*"):
            axes = "*".join(plan.mesh.names[axis] for axis in each.move.axes)
            tensor = plan.graph.tensors[each.tensor].name.removeprefix(f"layers.{number}.")
            found.append((str(each.move.kind), axes, tensor, each.move.message_bytes / (BYTES * TOKENS)))
    return sorted(found)


def sent(plan, number):
    """Bytes of the messages of a layer, by block, pass, kind and axis; experts' exchanges go along `ep`."""
    found = Counter()
    for name, each in collectives_of(plan, number):
        phase = Phase.BACKWARD if each.op >= plan.graph.first_backward else Phase.FORWARD
        block, axes = name.split(".")[0], [plan.mesh.names[axis] for axis in each.move.axes]
        is_exchange = block == "moe_mlp" and each.move.kind == OpKind.ALL_TO_ALL
        assert is_exchange or len(axes) == 1
        found[block, phase, each.move.kind, "ep" if is_exchange else axes[0]] += each.move.message_bytes
    return found


def told(job, blocks, **degrees):
    """The same of the cost model's list for these blocks, with nothing lost on wires and all experts alike."""
    runtime = replace(
        find_runtime("megatron-core"),
        network_efficiency=1.0,
        expert_imbalance=0.0,
        gathers_inputs_again=False,
        deduplicates_tokens=False,
        fp32_ring_gradients=False,
    )
    config = ParallelConfig(**degrees)
    inside = config.tp * config.cp * config.up
    grid = ConfigGrid.from_configs([replace(config, dp=CLUSTER.num_devices // inside)])
    collectives = layer_collectives(job, runtime, grid, place(CLUSTER, grid))
    sizes = asdict(config) | {"expert_tp": config.expert_tp or config.tp}
    found = Counter()
    for use in layer_uses(job, runtime, grid):
        site, collective, block = use.site.split(".")[0], collectives[use.site], job.model.block_names[use.block]
        if block in blocks and sizes[site] > 1 and use.count[0] > 0:
            key = (block, use.phase, collective.kind, site.removeprefix("expert_"))
            found[key] += float((use.count * collective.wire_bytes)[0])
    return found


# What is sent


def test_tensor_parallelism_gathers_and_scatters_once_a_block_and_pass():
    """With sequence parallelism a block gathers its input and scatters its output, and their gradients on the way back.

    The gradient that enters the last layer is gathered for that layer's last product; it is the head norm's.
    """
    assert of_layer(planned("llama3-8b", tp=4), 1) == sorted(
        [
            ("all_gather", "tp", "attention.norm", HIDDEN),
            ("reduce_scatter", "tp", "attention.out", HIDDEN),
            ("all_gather", "tp", "dense_mlp.norm", HIDDEN),
            ("reduce_scatter", "tp", "dense_mlp.down", HIDDEN),
            ("all_gather", "tp", "head.norm.gradient", HIDDEN),
            ("reduce_scatter", "tp", "dense_mlp.up.data_gradient", HIDDEN),
            ("all_gather", "tp", "attention.residual.gradient_sum", HIDDEN),
            ("reduce_scatter", "tp", "attention.qkv.data_gradient", HIDDEN),
        ]
    )


def test_without_sequence_parallelism_there_are_two_reductions_a_pass():
    """Shoeybi's f and g: an all-reduce behind each block forward, and behind the gradient of its input backward."""
    assert of_layer(planned("llama3-8b", tp=4, sequence_parallel=False), 1) == sorted(
        ("all_reduce", "tp", tensor, HIDDEN)
        for tensor in ("attention.out", "attention.qkv.data_gradient", "dense_mlp.down", "dense_mlp.up.data_gradient")
    )


def test_context_parallelism_gathers_keys_and_scatters_their_gradients():
    """Along cp only keys and values move, and their gradients back."""
    assert of_layer(planned("llama3-8b", cp=4), 1) == sorted(
        [
            ("all_gather", "cp", "attention.key_rotary", KEYS),
            ("all_gather", "cp", "attention.qkv.value", KEYS),
            ("reduce_scatter", "cp", "attention.core.gradient.keys", KEYS),
            ("reduce_scatter", "cp", "attention.core.gradient.values", KEYS),
        ]
    )


def test_ulysses_exchanges_four_tensors_each_way():
    """Along up queries, keys, values and the context are exchanged around the core, and their gradients backward."""
    assert of_layer(planned("llama3-8b", up=4), 1) == sorted(
        ("all_to_all", "up", f"attention.{tensor}", elements / 4)
        for elements, tensors in (
            (HIDDEN, ("query_rotary", "core.context", "out.data_gradient", "core.gradient.queries")),
            (KEYS, ("key_rotary", "qkv.value", "core.gradient.keys", "core.gradient.values")),
        )
        for tensor in tensors
    )


def test_experts_keep_the_slots_that_their_ranks_have_filled():
    """Where experts are whole on every rank, ranks with other tokens compute other slots, and exchange none."""
    for degrees in ({"cp": 4}, {"up": 4}, {"tp": 4, "expert_tp": 1}, {"cp": 2, "tp": 2, "expert_tp": 1}):
        assert of_layer(planned("mixtral-8x7b", **degrees), 1, "moe_mlp") == []


def test_experts_stay_where_they_are_dealt_and_slots_are_cut_by_the_other_axes():
    """With cp beside experts that are dealt over tp, exchanges go along tp alone, each of a cp rank's own tokens."""
    found = of_layer(planned("mixtral-8x7b", cp=2, tp=2, ep=2, expert_tp=1), 1, "moe_mlp")

    assert [(kind, axes, elements) for kind, axes, _, elements in found] == 4 * [("all_to_all", "tp", 2 * HIDDEN / 4)]


AGREEING = {
    "tp": ("llama3-8b", {"tp": 4}),
    "tp without sequence parallelism": ("llama3-8b", {"tp": 4, "sequence_parallel": False}),
    "cp, up and tp": ("llama3-8b", {"cp": 2, "up": 2, "tp": 2}),
    "experts over dp, their ffn over tp": ("mixtral-8x7b", {"tp": 2, "ep": 4}),
    "experts over dp and tp": ("mixtral-8x7b", {"tp": 4, "ep": 8, "expert_tp": 1}),
    "experts over cp, their ffn over tp": ("mixtral-8x7b", {"cp": 2, "tp": 2, "ep": 2}),
    "latent attention, shared experts": ("deepseek-v3", {"tp": 4, "ep": 8, "expert_tp": 1}),
    "latent attention, experts' ffn over tp": ("deepseek-v3", {"tp": 2, "ep": 4}),
}


@pytest.mark.parametrize(("model", "degrees"), AGREEING.values(), ids=AGREEING)
def test_the_cost_model_counts_what_the_plan_sends(model, degrees):
    """Block by block and pass by pass, the messages are those of the cost model's list, but for two differences.

    What a ring passes is gathered here, of which (cp - 1) / cp comes from other ranks; and backward the ring passes
    keys and values again, which a plan has kept. Latent attention gathers the ranks of its projections (2,112 elements
    of a token of deepseek-v3), for which the cost model counts the hidden size (7,168).
    """
    plan = planned(model, **degrees)
    own, cp = sent(plan, 1), degrees.get("cp", 1)
    for (block, phase, kind, axis), message_bytes in list(own.items()):
        if axis == "cp" and block == "attention":
            del own[block, phase, kind, axis]
            passes = 2 if phase == Phase.BACKWARD else 1
            own[block, phase, OpKind.SEND_RECV, axis] += passes * message_bytes * (cp - 1) / cp
    if find_model(model).plain.kv_lora_rank:
        for phase, kind in ((Phase.FORWARD, OpKind.ALL_GATHER), (Phase.BACKWARD, OpKind.REDUCE_SCATTER)):
            own["attention", phase, kind, "tp"] *= 7168 / (1536 + 512 + 64)

    expected = told(job_of(model), {key[0] for key in own}, **degrees)
    assert len(own) >= 2
    assert own == pytest.approx(expected, rel=1e-12)


# Other kinds of blocks

MIXERS = (
    {"tp": 4},
    {"tp": 4, "sequence_parallel": False},
    {"cp": 4},
    {"up": 4},
    {"cp": 2, "tp": 2},
    {"up": 2, "tp": 2},
)
DEALT = ({"tp": 4}, {"cp": 4}, {"tp": 4, "ep": 8, "expert_tp": 1}, {"up": 2, "tp": 2})


def job_of_kind(kind):
    """Two layers of one kind of block."""
    return TrainingJob(model=model_of(KINDS[kind]), sequence_length=TOKENS, global_batch_size=64, zero_stage=1)


def as_of_ring(kind, own, cp):
    """Messages of a plan with keys and values passed round a ring instead of gathered, if the block has attention."""
    found = Counter(own)
    for (block, phase, sent_as, axis), message_bytes in own.items():
        if axis == "cp" and isinstance(KINDS[kind], Attention | LatentAttention):
            del found[block, phase, sent_as, axis]
            passes = 2 if phase == Phase.BACKWARD else 1
            found[block, phase, OpKind.SEND_RECV, axis] += passes * message_bytes * (cp - 1) / cp
    return found


def beyond_the_list(kind, phase, degrees):
    """What a plan sends and the cost model's list of a block lacks, or counts otherwise: (kind, axis, more bytes).

    Mamba adds up the inputs of its scan over the ranks that share the channels. Of latent attention the list counts
    the hidden size where the ranks are gathered, and keys as large as values. An indexer is left out there: it needs
    the hidden values of all tokens on every rank of tp, its keys go where attention's go, and Ulysses needs the choice
    of all queries; attention tells it what its heads gave the chosen keys.
    """
    block, cp = KINDS[kind], degrees.get("cp", 1)
    ways = cp * degrees.get("up", 1)
    per_element = BYTES * TOKENS / ways
    is_tp, is_up, is_split = "tp" in degrees, "up" in degrees, degrees.get("sequence_parallel", True)
    if isinstance(block, Mamba1):
        (axis,) = (name for name in ("tp", "cp", "up") if degrees.get(name, 1) > 1)
        # the core has the whole sequence
        return [(OpKind.ALL_REDUCE, axis, BYTES * TOKENS * (block.step_rank + 2 * block.state_size))]
    if isinstance(block, LatentAttention):
        ranks = block.q_lora_rank + block.kv_lora_rank + block.qk_rope_head_dim - block.hidden_size
        larger = block.num_heads * (block.head_dim - block.v_head_dim) / degrees.get("tp", 1)
        is_forward = phase == Phase.FORWARD
        passes, found = 1 if is_forward else 2, []
        if isinstance(block, SparseLatentAttention):
            chosen, keys = block.mask.window, block.index_head_dim
            of_keys = BYTES * keys + (INDEX_BYTES if is_forward else BYTES) * chosen
            found += [
                (OpKind.SEND_RECV, "cp", per_element * keys * (cp - 1) * passes),
                (OpKind.ALL_GATHER if is_forward else OpKind.REDUCE_SCATTER, "up", TOKENS / cp * of_keys * is_up),
                (OpKind.ALL_REDUCE, "tp", 0 if is_forward else per_element * chosen * is_tp),
            ]
            found += [(OpKind.ALL_GATHER, "tp", per_element * block.hidden_size * is_forward * is_tp * is_split)]
        found += [(OpKind.SEND_RECV, "cp", per_element * larger * (cp - 1) * passes)]
        if not is_tp:
            return found
        if is_split:
            return [*found, (OpKind.ALL_GATHER if is_forward else OpKind.REDUCE_SCATTER, "tp", per_element * ranks)]
        return found if is_forward else [*found, (OpKind.ALL_REDUCE, "tp", per_element * ranks)]
    return []


CASES = [
    (kind, degrees)
    for kind, block in KINDS.items()
    # norms of all heads need those of other ranks, which the cost model's list lacks
    if kind != "wide norms"
    for degrees in (DEALT if isinstance(block, Experts) else MIXERS)
    # scans of whole channels over two axes add up sums along both at once
    if not (isinstance(block, Mamba1) and len(degrees) == 2 and "tp" in degrees and "sequence_parallel" not in degrees)
]


@pytest.mark.parametrize(("kind", "degrees"), CASES, ids=lambda value: str(value).translate({39: None}))
def test_every_kind_of_block_sends_what_the_cost_model_counts(kind, degrees):
    """By hand every kind of block sends the messages of the cost model's list, pass by pass, with named differences."""
    job = job_of_kind(kind)
    own = as_of_ring(kind, sent(planned_job(job, **degrees), 1), degrees.get("cp", 1))

    (label,) = {block.label for layer in job.model.layers for block in layer}
    expected = told(job, {label}, **degrees)
    for phase in Phase:
        for sent_as, axis, more in beyond_the_list(kind, phase, degrees):
            expected[label, phase, sent_as, axis] += more
    expected = {key: number for key, number in expected.items() if number}
    assert dict(own) == pytest.approx(expected, rel=1e-12)


FLOPS = [
    (kind, degrees)
    for kind, block in KINDS.items()
    for degrees in ({"tp": 4}, {"cp": 4}, {"up": 2, "tp": 2}, *([{"tp": 4, "ep": 8, "expert_tp": 1}]))
    if isinstance(block, Experts) or "ep" not in degrees
]


@pytest.mark.parametrize(("kind", "degrees"), FLOPS, ids=lambda value: str(value).translate({39: None}))
def test_every_kind_of_block_computes_what_the_cost_model_counts(kind, degrees):
    """By hand a device has the FLOPs of the block's own operators, pass by pass: windows by their mask, scans by heads.

    The products of latent attention that make the ranks are those of the tokens of a sequence parallel rank.
    """
    job, config = job_of_kind(kind), ParallelConfig(**degrees)
    plan = planned_job(job, **degrees)
    runtime = replace(find_runtime("megatron-core"), vocabulary_multiple=1)
    grid = ConfigGrid.from_configs([replace(config, dp=max(config.ep * config.expert_tp, config.tp) // config.tp)])
    dp = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)).get("dp", 1)

    found, expected = Counter(), Counter()
    for number, op in enumerate(plan.graph.ops):
        if op.name.startswith("layers.") and op.flop:
            axes = zip(plan.mesh.sizes, plan.served[number].tolist(), strict=True)
            ways = math.prod(size for size, factor in axes if factor != NONE)
            found["backward" if number >= plan.graph.first_backward else "forward"] += op.flop / ways
    for op in step_operators(job, runtime, grid):
        if job.model.blocks[job.model.block_names.index(op.block)].family in LAYER_FAMILIES:
            # a micro-batch of every replica is planned together, and each has one sequence
            expected[str(op.phase)] += float(op.flop[0]) * len(job.model.layers)
    assert dp == grid.dp[0]
    assert found == pytest.approx(dict(expected), rel=1e-12)


STATES = [kind for kind, block in KINDS.items() if isinstance(block, RecurrentMixer)]


@pytest.mark.parametrize("degrees", [{"tp": 32}, {"cp": 32}, {"up": 32}, {"cp": 8, "tp": 4}])
@pytest.mark.parametrize("kind", [kind for kind in STATES if KINDS[kind].state_heads == 16])
def test_heads_of_a_state_that_do_not_divide_have_no_plan(kind, degrees):
    """Ranks have whole heads of a state: where there are more ranks than heads, there is no plan by hand."""
    assert planned_job(job_of_kind(kind), **degrees) is None


@pytest.mark.parametrize("kind", STATES)
def test_scans_are_not_cut_along_the_sequence(kind):
    """Convolution and scan offer the batch and the heads of the state, but never the sequence, in either pass."""
    graph = transformer_graph(job_of_kind(kind), micro_batch_size=2)
    scans = [op for op in graph.ops if op.primitive.removesuffix("_gradient").endswith(("_scan", "convolution"))]

    assert len(scans) >= 4
    assert {op.rule.factors[factor].name for op in scans for factor in op.rule.cuttable} == {"batch", "state_heads"}


# Where there is none


def test_copied_key_heads_have_no_plan():
    """With more ranks of tp than key heads, frameworks copy these, which is no layout of theirs."""
    assert planned("llama3-8b", tp=8) is not None
    assert planned("llama3-8b", tp=16) is None


@pytest.mark.parametrize("degrees", [{"tp": 4, "ep": 2}, {"cp": 2, "tp": 3, "ep": 4}])
def test_experts_that_end_inside_an_axis_have_no_axes(degrees):
    """Experts over a part of tp, or tp split between their ffn and them, would need that axis in two."""
    assert layer_axes(ParallelConfig(**degrees, expert_tp=1)) is None
    assert layer_axes(ParallelConfig(tp=4, ep=4, expert_tp=2)) is None


def test_axes_stand_as_ranks_do():
    """The slowest axis first, those of one device left out, and dp as far as experts need it."""
    assert layer_axes(ParallelConfig(pp=4, dp=8)) == {}
    assert layer_axes(ParallelConfig(dp=16, cp=2, tp=4, ep=2)) == {"cp": 2, "tp": 4}
    assert layer_axes(ParallelConfig(dp=16, up=2, tp=2, ep=8)) == {"dp": 4, "up": 2, "tp": 2}


# Updates


def test_updates_are_spread_and_parameters_are_not():
    """Along cp moments and updates are cut and parameters are whole; gradients are scattered, parameters gathered."""
    plan = planned("llama3-8b", cp=2)
    graph = plan.graph
    lies = {tensor.name: plan.dims_of(number) for number, tensor in enumerate(graph.tensors)}
    kinds = {str(each.move.kind) for each in cost_of(plan).collectives if graph.tensors[each.tensor].kind == "gradient"}

    assert set(lies["layers.0.dense_mlp.up.weight"]) == {()}
    assert ("cp",) in lies["layers.0.dense_mlp.up.weight.first_moment"]
    assert kinds == {"reduce_scatter"}
