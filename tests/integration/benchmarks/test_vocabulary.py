"""A planner's vocabulary: what it does not know it never cuts, but where a pin says so."""

import pytest

from benchmarks.papers.symbolic_prices import Volumes
from benchmarks.papers.vocabulary import EXPERTS, SEQUENCE, restricted
from costmodels.job.model_catalog import find_model
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import NONE
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.pins import Pin, resolve_pins
from tuner.planners.sharding.recursive import ORDERS, recursive_plan, refine_mesh

MESH = DeviceMesh(names=("npu",), sizes=(8,), cluster=find_cluster("ascend-910b"))
BMMS = (Pin(op="*.moe_mlp.up", dim="experts", ways=8), Pin(op="*.moe_mlp.down", dim="experts", ways=8))


def graph_of(name, *, batch=1):
    """Two layers of a catalog model."""
    job = TrainingJob(model=find_model(name), sequence_length=1024, global_batch_size=batch)
    return transformer_graph(job, micro_batch_size=batch, num_layers=2)


def planned(graph, *, pins=(), order="price", prices=None):
    """D-Rec's plan on eight devices."""
    fine, levels = refine_mesh(MESH)
    closed = resolve_pins(pins, graph, MESH, levels).closed
    return recursive_plan(graph, fine, levels, order=order, closed=closed, prices=prices)


def served(plan):
    """The names of the factors that each operator's axes serve, by its name."""
    return {
        op.name: [op.rule.factors[factor].name for factor in row if factor != NONE]
        for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)
    }


@pytest.mark.parametrize("prices", [None, Volumes()])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "missing"), [("mixtral-8x7b", EXPERTS), ("llama3-8b", SEQUENCE)])
def test_what_is_missing_is_never_served(name, missing, order, prices):
    """No order and no prices cut a factor that the vocabulary lacks, though each does so in the whole vocabulary."""
    graph = graph_of(name)

    def names(graph):
        return {factor for found in served(planned(graph, order=order, prices=prices)).values() for factor in found}

    assert not names(restricted(graph, missing)) & missing
    assert names(graph) & missing


def test_a_pin_puts_its_own_back():
    """Pinned products are cut by experts, and so may be what follows them; no other product or router is."""
    graph = graph_of("mixtral-8x7b")

    found = served(planned(restricted(graph, EXPERTS, BMMS), pins=BMMS))

    by_experts = {name for name, factors in found.items() if "experts" in factors}
    products = {op.name for op in graph.ops if op.precision}
    assert by_experts & products == {f"layers.{at}.moe_mlp.{role}" for at in (0, 1) for role in ("up", "down")}
    assert all(found[name] == ["experts"] * 3 for name in by_experts & products)
    assert {f"layers.{at}.moe_mlp.activation" for at in (0, 1)} <= by_experts


def test_what_follows_is_coupled_by_a_dim():
    """Sequence comes back to norms and sums beside pinned products, and not to attention, which no pin names."""
    pin = Pin(op="*.dense_mlp.up", dim="sequence", ways=8)

    graph = restricted(graph_of("llama3-8b"), SEQUENCE, (pin,))

    rules = {op.name: op.rule for op in graph.ops}
    able = {name: {rule.factors[each].name for each in rule.cuttable} for name, rule in rules.items()}
    assert "sequence" in able["layers.0.dense_mlp.norm"] & able["layers.1.attention.residual"]
    assert "queries" not in able["layers.0.attention.core"]
    assert "sequence" not in able["layers.0.attention.qkv"] | able["layers.0.dense_mlp.down"]
