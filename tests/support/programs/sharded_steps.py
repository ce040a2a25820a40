"""Training steps of small models, and plans that shard them, for tests of steps that run as planned in torch."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import NONE, Plan
from tests.support.programs.small_backends import cluster_of
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step

BATCH = 8

GPT = load_model("gpt-tiny.yaml", Path(__file__).parents[3] / "configs" / "models").changed(num_layers=1)
LLAMA = GPT.changed(
    name="llama",
    num_kv_heads=4,
    gated_ffn=True,
    tied_embeddings=False,
    learned_positions=0,
    norm="rms",
    qk_norm=True,
    qkv_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
)
ONE_KEY = LLAMA.changed(name="one-key", num_kv_heads=1)
MIXTRAL = LLAMA.changed(
    name="mixtral",
    num_experts=4,
    top_k=2,
    expert_ffn_size=48,
    num_shared_experts=1,
    shared_expert_ffn_size=64,
    shared_expert_gate=True,
)
WIDE = {"hidden_size": 256, "head_dim": 32, "ffn_size": 1024}
"""Sizes with which planners shard a model on processor cores."""
PINNED = LayerPlanning(name="descent", pins=(Pin(op="layers.*.dense_mlp.up", dim="hidden", axis="tp"),))


def wide(model):
    """Return a model that planners shard on processor cores."""
    return model.changed(name=f"wide-{model.name}", **WIDE)


def job_of(model):
    """Build a job of one batch of eight sequences."""
    return TrainingJob(model=model, sequence_length=64, global_batch_size=BATCH, precision="fp32")


def unsharded(model):
    """Plan the step on one device."""
    graph = transformer_graph(job_of(model), micro_batch_size=BATCH)
    mesh = DeviceMesh(names=("dp",), sizes=(1,), cluster=cluster_of(1))
    return Plan(graph=graph, mesh=mesh, served=np.full((len(graph.ops), 1), NONE))


def of_study(model, num_devices, planning=LayerPlanning(), **degrees):  # noqa: B008 # it is frozen
    """Plan the step of a study's candidate."""
    config = ParallelConfig(**{"mbs": BATCH // degrees.get("dp", 1), **degrees})
    return plan_step(job_of(model), cluster_of(num_devices), config, planning)


def of_planner(model, planner, sizes=(2, 4)):
    """Plan the graph of a step as `meshtune plan` does."""
    graph, mesh = transformer_graph(job_of(model), micro_batch_size=BATCH), _mesh(sizes)
    return plan_graph(graph, mesh, PlannerOptions(planner=planner, whole_axes=True)).plan


def by_chance(model, seed, sizes=(2, 2, 2)):
    """Let every axis serve any factor that it divides, or none, at every operator."""
    graph, mesh, rng = (
        transformer_graph(job_of(model), micro_batch_size=BATCH),
        _mesh(sizes),
        np.random.default_rng(seed),
    )
    served = np.full((len(graph.ops), len(sizes)), NONE)
    for number, op in enumerate(graph.ops):
        for axis, size in enumerate(sizes):
            ways = {factor: size * _ways(sizes, served[number], factor) for factor in op.rule.cuttable}
            served[number, axis] = rng.choice(
                [NONE, *(factor for factor in ways if op.rule.factors[factor].size % ways[factor] == 0)]
            )
    return Plan(graph=graph, mesh=mesh, served=served)


def _mesh(sizes: Sequence[int]) -> DeviceMesh:
    return DeviceMesh(names=("a", "b", "c")[: len(sizes)], sizes=tuple(sizes), cluster=cluster_of(int(np.prod(sizes))))


def _ways(sizes: Sequence[int], row: np.ndarray, factor: int) -> int:
    return int(np.prod([size for size, served in zip(sizes, row, strict=True) if served == factor]))
