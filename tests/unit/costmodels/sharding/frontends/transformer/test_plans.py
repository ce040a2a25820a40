"""Known ways to parallelise a transformer, as plans by hand: they communicate what they are known to, to the byte."""

import math
from collections import Counter
from fnmatch import fnmatch

import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import cost_of
from tests.support.graphs.named_plans import collectives, mesh_of, plan_by_names

TOKENS, BATCH, BYTES = 2048, 8, 2
MESH = mesh_of(axis=8)
SEQUENCE = ("sequence", "queries", "chunks")
TENSOR = ("kv_heads", "heads", "ffn", "shared_ffn", "vocabulary")


def graph_of(name, *, num_layers=2, batch=BATCH, **changes):
    """A few layers of a catalog model, perhaps with some sizes changed."""
    job = TrainingJob(
        model=find_model(name).changed(**changes), sequence_length=TOKENS, global_batch_size=64, zero_stage=0
    )
    return transformer_graph(job, micro_batch_size=batch, num_layers=num_layers)


LLAMA = graph_of("llama3-8b")
HIDDEN_BYTES = BATCH * TOKENS * 4096 * BYTES
ROW_BYTES = BATCH * TOKENS * 4
PARAMETERS = {
    tensor.name: tensor
    for op in LLAMA.ops
    if op.primitive == "state"
    for tensor in (LLAMA.tensors[op.results[0]],)
    if tensor.kind == "parameter"
}


def planned(graph, *rules):
    """A plan of one axis over eight devices."""
    return plan_by_names(graph, MESH, axis=list(rules))


def sharded_states(*, parameters):
    """Rules that cut the optimizer's states by the hidden dim, which all parameters have, and perhaps these too."""
    cut = ("hidden",)
    own = [(name, cut if parameters else ()) for name in PARAMETERS]
    return [*own, ("*.update", cut), ("*_moment", cut)]


def of_layer(found, number, *, but=()):
    """The collectives of one layer, without its number, apart from some patterns of tensors."""
    prefix = f"layers.{number}."
    return [
        (kind, tensor.removeprefix(prefix), message)
        for kind, tensor, message in found
        if tensor.startswith(prefix) and not any(fnmatch(tensor, pattern) for pattern in but)
    ]


def test_data_parallelism_reduces_every_gradient():
    """With the batch cut, every parameter's gradient is all-reduced, and nothing else is sent but the loss."""
    found = collectives(planned(LLAMA, ("*", ("batch",))))

    losses = [each for each in found if each[1] == "head.cross_entropy"]
    assert losses == [("all_reduce", "head.cross_entropy", 4)]
    assert {kind for kind, _, _ in found} == {"all_reduce"}
    assert sorted(message for _, _, message in found if message != 4) == sorted(
        tensor.num_bytes for tensor in PARAMETERS.values()
    )


def test_fully_sharded_data_parallelism_gathers_twice_and_scatters_once():
    """With states cut too, parameters are gathered in each pass that reads them, and gradients reduce-scattered."""
    plan = planned(LLAMA, *sharded_states(parameters=True), ("*", ("batch",)))
    found = [each for each in collectives(plan) if each[1] != "head.cross_entropy"]

    passes = {name: 1 if name == "embedding.weight" else 2 for name in PARAMETERS}  # a lookup's gradient reads no table
    gathered = [(tensor.num_bytes, name) for name, tensor in PARAMETERS.items() for _ in range(passes[name])]
    assert sorted((message, tensor) for kind, tensor, message in found if kind == "all_gather") == sorted(gathered)
    assert sorted(message for kind, _, message in found if kind == "reduce_scatter") == sorted(
        tensor.num_bytes for tensor in PARAMETERS.values()
    )
    assert {kind for kind, _, _ in found} == {"all_gather", "reduce_scatter"}


def test_sharded_optimizer_states_gather_parameters_once():
    """With the states of the optimizer cut alone (ZeRO 1), updated parameters are gathered after the update."""
    plan = planned(LLAMA, *sharded_states(parameters=False), ("*", ("batch",)))
    found = [each for each in collectives(plan) if each[1] != "head.cross_entropy"]

    sizes = sorted(tensor.num_bytes for tensor in PARAMETERS.values())
    assert sorted(message for kind, _, message in found if kind == "all_gather") == sizes
    assert sorted(message for kind, _, message in found if kind == "reduce_scatter") == sizes
    assert {tensor for kind, tensor, _ in found if kind == "all_gather"} == {f"{name}.update" for name in PARAMETERS}


def test_tensor_parallelism_reduces_twice_in_each_pass():
    """Heads, ffn and vocabulary cut (Megatron): two all-reduces of the activations per layer and pass.

    Beside them one for the lookup, one for the head's gradient, and three numbers of each token for the loss.
    """
    found = collectives(planned(LLAMA, ("*", TENSOR)))

    per_layer = [
        ("all_reduce", tensor, HIDDEN_BYTES)
        for tensor in ("attention.out", "attention.qkv.data_gradient", "dense_mlp.down", "dense_mlp.up.data_gradient")
    ]
    assert of_layer(found, 0) == of_layer(found, 1) == sorted(per_layer)
    assert [each for each in found if not each[1].startswith("layers.")] == [
        ("all_reduce", "embedding.lookup", HIDDEN_BYTES),
        *(("all_reduce", f"head.cross_entropy.{part}", ROW_BYTES) for part in ("label", "maximum", "sum")),
        ("all_reduce", "head.logits.data_gradient", HIDDEN_BYTES),
    ]


def test_sequence_parallelism_gathers_and_scatters_instead():
    """Norms and residuals cut by the sequence beside tensor parallelism: all-gathers and reduce-scatters.

    Each all-reduce of tensor parallelism becomes one of each (Korthikanti et al. 2022, section 4.2.2); what is gathered
    for a product is kept for its weight's gradient. Gradients of norms' weights are partial sums.
    """
    spread = ("*norm*", "*residual*", "*gradient_sum")
    plan = planned(LLAMA, *((each, ("sequence",)) for each in spread), ("*", TENSOR))
    found = collectives(plan)

    per_layer = [
        ("all_gather", "attention.norm", HIDDEN_BYTES),
        ("reduce_scatter", "attention.out", HIDDEN_BYTES),
        ("all_gather", "dense_mlp.norm", HIDDEN_BYTES),
        ("reduce_scatter", "dense_mlp.down", HIDDEN_BYTES),
        ("reduce_scatter", "dense_mlp.up.data_gradient", HIDDEN_BYTES),
        ("all_gather", "attention.residual.gradient_sum", HIDDEN_BYTES),
        ("reduce_scatter", "attention.qkv.data_gradient", HIDDEN_BYTES),
        ("all_reduce", "attention.norm.gradient.weight", 4096 * BYTES),
        ("all_reduce", "dense_mlp.norm.gradient.weight", 4096 * BYTES),
    ]
    # the gradient that enters a layer's MLP is that of its residual: made in the next layer, or by the head's norm
    first = [*per_layer, ("all_gather", "dense_mlp.residual.gradient_sum", HIDDEN_BYTES)]
    assert of_layer(found, 0) == sorted(first)
    assert of_layer(found, 1) == sorted(per_layer)
    assert ("all_gather", "head.norm.gradient", HIDDEN_BYTES) in found


def test_ulysses_exchanges_around_the_core():
    """The sequence cut everywhere and heads in the core: all-to-alls of queries, keys, values and context, and back."""
    plan = planned(LLAMA, ("*.core*", ("kv_heads",)), ("*", SEQUENCE))
    found = [each for each in collectives(plan) if each[0] != "all_reduce"]

    keys_bytes = HIDDEN_BYTES / 4  # 8 heads of keys for 32 of queries
    per_layer = [
        ("all_to_all", "attention.query_rotary", HIDDEN_BYTES / 8),
        ("all_to_all", "attention.key_rotary", keys_bytes / 8),
        ("all_to_all", "attention.qkv.value", keys_bytes / 8),
        ("all_to_all", "attention.core.context", HIDDEN_BYTES / 8),
        ("all_to_all", "attention.out.data_gradient", HIDDEN_BYTES / 8),
        ("all_to_all", "attention.core.gradient.queries", HIDDEN_BYTES / 8),
        ("all_to_all", "attention.core.gradient.keys", keys_bytes / 8),
        ("all_to_all", "attention.core.gradient.values", keys_bytes / 8),
    ]
    assert of_layer(found, 0) == of_layer(found, 1) == sorted(per_layer)
    assert len(found) == 2 * len(per_layer)


def test_context_parallelism_gathers_keys_and_values():
    """The sequence cut everywhere: keys and values are gathered for the core, their gradients reduce-scattered."""
    found = [each for each in collectives(planned(LLAMA, ("*", SEQUENCE))) if each[0] != "all_reduce"]

    keys_bytes = HIDDEN_BYTES / 4
    per_layer = [
        ("all_gather", "attention.key_rotary", keys_bytes),
        ("all_gather", "attention.qkv.value", keys_bytes),
        ("reduce_scatter", "attention.core.gradient.keys", keys_bytes),
        ("reduce_scatter", "attention.core.gradient.values", keys_bytes),
    ]
    assert of_layer(found, 0) == of_layer(found, 1) == sorted(per_layer)
    assert len(found) == 2 * len(per_layer)


EXPERT_OPS = tuple(f"*.moe_mlp.{role}*" for role in ("up", "down", "activation"))


@pytest.mark.parametrize("tokens_by", [("batch",), SEQUENCE])
@pytest.mark.parametrize(("name", "num_layers"), [("mixtral-8x7b", 2), ("deepseek-v3", 4)])
def test_expert_parallelism_exchanges_slots_twice_in_each_pass(name, num_layers, tokens_by):
    """Tokens cut by batch or sequence and experts by expert: four all-to-alls of all slots per layer, and no more.

    Gradients of experts' weights are whole where the experts are.
    """
    model, graph = find_model(name), graph_of(name, num_layers=num_layers)
    plan = planned(graph, *((each, ("experts",)) for each in EXPERT_OPS), ("*", tokens_by))
    found = collectives(plan)

    slot_bytes = BATCH * TOKENS * model.top_k * model.hidden_size * BYTES
    per_layer = [
        ("all_to_all", f"moe_mlp.{tensor}", slot_bytes / 8)
        for tensor in ("dispatch", "down", "combine.gradient.slots", "up.data_gradient")
    ]
    last = num_layers - 1
    assert [each for each in of_layer(found, last) if each[0] == "all_to_all"] == sorted(per_layer)
    reduced = {tensor for kind, tensor, _ in of_layer(found, last) if kind == "all_reduce"}
    assert not any(fnmatch(f"layers.0.{tensor}", pattern) for tensor in reduced for pattern in EXPERT_OPS)
    assert "moe_mlp.router.weight_gradient" in reduced


def test_expert_tensor_parallelism_needs_no_exchange():
    """Each expert's ffn cut instead: one all-reduce of its slots in each pass, and no all-to-all."""
    graph = graph_of("mixtral-8x7b", num_layers=1)
    found = of_layer(collectives(planned(graph, ("*.moe_mlp.*", ("ffn", "expert_ffn")))), 0)

    slot_bytes = BATCH * TOKENS * 2 * 4096 * BYTES
    assert found == [("all_reduce", "moe_mlp.down", slot_bytes), ("all_reduce", "moe_mlp.up.data_gradient", slot_bytes)]


def test_latent_attention_reduces_at_its_ranks():
    """Heads of latent attention cut: the output, and in the backward pass the ranks and the keys' shared part."""
    model, graph = find_model("deepseek-v3"), graph_of("deepseek-v3", num_layers=1)
    found = of_layer(collectives(planned(graph, ("*", TENSOR))), 0, but=("*dense_mlp*",))

    tokens_bytes = BATCH * TOKENS * BYTES
    assert found == [
        ("all_reduce", "attention.key_rotary.gradient.rotary", tokens_bytes * model.plain.qk_rope_head_dim),
        ("all_reduce", "attention.kv_up.data_gradient", tokens_bytes * model.plain.kv_lora_rank),
        ("all_reduce", "attention.out", tokens_bytes * model.hidden_size),
        ("all_reduce", "attention.q_up.data_gradient", tokens_bytes * model.plain.q_lora_rank),
    ]


def test_queries_that_share_one_key_can_be_cut():
    """With one key head the queries' heads are cut: gradients of key and value are partial, the hidden's are too."""
    graph = graph_of("llama3-8b", num_layers=1, num_kv_heads=1)
    plan = planned(graph, ("*", ("query_groups", "heads")))
    found = of_layer(collectives(plan), 0)

    one_head_bytes = BATCH * TOKENS * 128 * BYTES
    assert found == [
        ("all_reduce", "attention.core.gradient.keys", one_head_bytes),
        ("all_reduce", "attention.core.gradient.values", one_head_bytes),
        ("all_reduce", "attention.out", HIDDEN_BYTES),
        ("all_reduce", "attention.q.data_gradient", HIDDEN_BYTES),
    ]


def test_two_axes_combine():
    """Data and tensor parallelism on two axes: each sends what it sends alone, of the other's share."""
    mesh = mesh_of(data=2, model=4)
    plan = plan_by_names(LLAMA, mesh, data=[("*", ("batch",))], model=[("*", TENSOR)])
    cost = cost_of(plan)

    by_axes = Counter()
    for each in cost.collectives:
        by_axes[each.move.axes] += each.move.message_bytes
    norms = sum(tensor.num_bytes for tensor in PARAMETERS.values() if len(tensor.shape) == 1)
    matrices = sum(tensor.num_bytes for tensor in PARAMETERS.values()) - norms
    assert by_axes[0,] == pytest.approx(matrices / 4 + norms + 4, rel=1e-12)
    assert by_axes[1,] == pytest.approx((10 * HIDDEN_BYTES + 3 * ROW_BYTES) / 2, rel=1e-12)
    assert len(by_axes) == 2


def test_sharding_states_saves_what_they_weigh():
    """Fully sharded, a device needs about the rest of the states less than with all of them: 10 bytes a parameter."""
    sharded = planned(LLAMA, *sharded_states(parameters=True), ("*", ("batch",)))
    whole = planned(LLAMA, ("*", ("batch",)))

    weight = 10 * sum(math.prod(tensor.shape) for tensor in PARAMETERS.values()) * 7 / 8
    saved = cost_of(whole).peak_memory_bytes - cost_of(sharded).peak_memory_bytes
    assert saved >= weight * 0.9
