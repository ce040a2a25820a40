"""Megatron's plan for a candidate's degrees: what its layers send, and beside it what the cost model says they do."""

from collections import Counter
from dataclasses import asdict, replace
from fnmatch import fnmatch

import pytest

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import with_layers
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.plan import cost_of, violations
from costmodels.step.communication import layer_collectives, layer_uses
from costmodels.step.placement import place
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.hand_made import hand_made, layer_axes

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
    config = ParallelConfig(**degrees)
    axes = layer_axes(config)
    assert axes
    graph = transformer_graph(job_of(model, layers), micro_batch_size=config.mbs * axes.get("dp", 1))
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


def told(model, layers, blocks, **degrees):
    """The same of the cost model's list for these blocks, with nothing lost on wires and all experts alike."""
    runtime = replace(
        find_runtime("megatron-core"),
        network_efficiency=1.0,
        expert_imbalance=0.0,
        gathers_inputs_again=False,
        deduplicates_tokens=False,
        fp32_ring_gradients=False,
    )
    job, config = job_of(model, layers), ParallelConfig(**degrees)
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

    expected = told(model, 2, {key[0] for key in own}, **degrees)
    assert len(own) >= 2
    assert own == pytest.approx(expected, rel=1e-12)


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
