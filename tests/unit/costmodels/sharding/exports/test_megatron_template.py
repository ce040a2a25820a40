"""Plans by hand are recognised as the parallelism that they are; one that differs in an operator is refused there."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.exports.megatron_template import megatron_parallelism
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import NONE
from hardware.io.errors import ConfigError
from tests.support.graphs.named_plans import mesh_of, plan_by_names
from tests.support.graphs.shared_factors import served_together
from tests.support.graphs.small_graphs import mlp

TENSOR = ("kv_heads", "query_groups", "heads", "ffn", "expert_ffn", "shared_ffn", "vocabulary")
SEQUENCE = ("sequence", "queries", "chunks", "slots")
EXPERTS = tuple((f"*.moe_mlp.{role}*", ("experts",)) for role in ("up", "down", "activation"))
SPREAD = tuple(
    (f"*{word}*", (*TENSOR, "sequence", "chunks"))
    for word in ("norm", "residual", "gradient_sum", "router", "routing", "dispatch", "combine", "moe_mlp.sum")
)
STATES = ("*.update", "*_moment")
MESH = mesh_of(axis=8)


def graph_of(name, *, num_layers=2, **changes):
    """A few layers of a catalog model."""
    model = find_model(name).changed(**changes)
    job = TrainingJob(model=model, sequence_length=2048, global_batch_size=64, zero_stage=0)
    return transformer_graph(job, micro_batch_size=8, num_layers=num_layers)


LLAMA, MIXTRAL = graph_of("llama3-8b"), graph_of("mixtral-8x7b")
DEEPSEEK = graph_of("deepseek-v3", num_layers=4)
ONE_KEY = graph_of("llama3-8b", num_layers=1, num_kv_heads=1)
PARAMETERS = tuple(
    (LLAMA.tensors[op.results[0]].name, ("hidden",))
    for op in LLAMA.ops
    if op.primitive == "state" and LLAMA.tensors[op.results[0]].kind == "parameter"
)
SHARDED = tuple((pattern, ("hidden",)) for pattern in STATES)


def by_one_axis(graph, *rules):
    """A plan of one axis over eight devices."""
    return plan_by_names(graph, MESH, axis=list(rules))


def by_two_axes(graph, data, model):
    """A plan of two axes over eight devices."""
    return plan_by_names(graph, mesh_of(data=2, model=4), data=list(data), model=list(model))


PLANS = {
    "data": (by_one_axis(LLAMA, ("*", ("batch",))), {"dp": 8}),
    "zero 1": (by_one_axis(LLAMA, *SHARDED, ("*", ("batch",))), {"dp": 8, "zero_stage": 1}),
    "zero 3": (by_one_axis(LLAMA, *SHARDED, *PARAMETERS, ("*", ("batch",))), {"dp": 8, "zero_stage": 3}),
    "tensor": (by_one_axis(LLAMA, ("*", TENSOR)), {"tp": 8}),
    "tensor, one key": (by_one_axis(ONE_KEY, ("*", TENSOR)), {"tp": 8}),
    "tensor, latent": (by_one_axis(DEEPSEEK, ("*", TENSOR)), {"tp": 8}),
    "sequence parallel": (
        by_one_axis(LLAMA, *((f"*{word}*weight*", TENSOR) for word in ("norm",)), *SPREAD, ("*", TENSOR)),
        {"tp": 8, "sequence_parallel": True},
    ),
    "context": (by_one_axis(LLAMA, ("*", SEQUENCE)), {"cp": 8}),
    "ulysses": (by_one_axis(LLAMA, ("*.core*", ("kv_heads",)), ("*", SEQUENCE)), {"up": 8}),
    "experts over data": (by_one_axis(MIXTRAL, *EXPERTS, ("*", ("batch",))), {"dp": 8, "ep": 8}),
    "experts over context": (by_one_axis(DEEPSEEK, *EXPERTS, ("*", SEQUENCE)), {"cp": 8, "ep": 8}),
    "data and tensor": (by_two_axes(LLAMA, [("*", ("batch",))], [("*", TENSOR)]), {"dp": 2, "tp": 4}),
    "experts over data, beside tensor": (
        by_two_axes(MIXTRAL, [*EXPERTS, ("*", ("batch",))], [*SPREAD, ("*", TENSOR)]),
        {"dp": 2, "tp": 4, "ep": 2, "sequence_parallel": True},
    ),
    "experts over tensor": (
        by_two_axes(MIXTRAL, [("*", ("batch",))], [*EXPERTS, *SPREAD, ("*", TENSOR)]),
        {"dp": 2, "tp": 4, "ep": 4, "expert_tp": 1, "sequence_parallel": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_plans_by_hand_are_recognised(name):
    """Degrees, sequence parallelism and the ZeRO stage are what the plan was made of; all else is 1 or off."""
    plan, expected = PLANS[name]
    found = megatron_parallelism(plan)

    plain = {"dp": 1, "cp": 1, "up": 1, "tp": 1, "ep": 1, "sequence_parallel": False, "zero_stage": 0}
    wanted = plain | {"expert_tp": expected.get("tp", 1)} | expected
    assert {key: getattr(found, key) for key in wanted} == wanted
    assert found.is_in_rank_order


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_one_other_operator_is_refused_by_name(name):
    """Whatever operator serves something else along an axis, the error names it and what Megatron-LM does there."""
    plan, _ = PLANS[name]
    rng = np.random.default_rng(0)
    inside = [
        number
        for number, op in enumerate(plan.graph.ops)
        if op.name.startswith(("layers.", "head.", "embedding.")) and not op.name.endswith(".gradient_sum")
    ]
    if "zero" in name:  # states may be cut by any dim
        inside = [
            number for number in inside if not plan.graph.ops[number].name.endswith(("weight", "update", "moment"))
        ]
    for number in rng.choice(inside, size=8, replace=False).tolist():
        op, axis = plan.graph.ops[number], int(rng.integers(len(plan.mesh.sizes)))
        free = [factor for factor in (NONE, *op.rule.cuttable) if factor not in plan.served[number].tolist()]
        served = plan.served.copy()
        served[number, axis] = rng.choice(free) if free else NONE
        assert (served != plan.served).any()

        with pytest.raises(ConfigError) as caught:
            megatron_parallelism(replace(plan, served=served))

        assert f"at {op.name} the plan " in str(caught.value)
        assert f"axis {plan.mesh.names[axis]} is closest to " in str(caught.value)
        assert "but Megatron-LM " in str(caught.value)


def test_programs_that_megatron_does_not_run_are_refused():
    """Experts cut inside while all else is whole are refused, and a graph that no study's model has at once."""
    graph = mlp(batch=64, hidden=64, ffn=256)

    with pytest.raises(ConfigError, match="Megatron-LM"):
        megatron_parallelism(by_one_axis(MIXTRAL, ("*.moe_mlp.*", ("ffn", "expert_ffn")), ("*", ())))
    with pytest.raises(ConfigError, match="trains no other programs"):
        megatron_parallelism(plan_by_names(graph, MESH, axis=[("*", ("batch",))]))


def test_axes_have_one_switch_and_an_order():
    """The optimizer's states cut along one data axis only are refused, for Megatron-LM has one ZeRO stage.

    Tensor parallelism along the mesh's slower axis is recognised, and known to be elsewhere than Megatron-LM's.
    """
    mesh = mesh_of(outer=2, inner=4)
    plan = served_together(LLAMA, mesh, outer=[("*", ("batch",))], inner=[*SHARDED, ("*", ("batch",))])
    found = megatron_parallelism(by_two_axes(LLAMA, [("*", TENSOR)], [("*", ("batch",))]))

    with pytest.raises(ConfigError, match="the ZeRO stage along all axes or none: the plan has 0 along outer and 1"):
        megatron_parallelism(plan)
    assert (found.tp, found.dp, found.is_in_rank_order) == (2, 4, False)
