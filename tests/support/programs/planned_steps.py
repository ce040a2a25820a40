"""Program that runs a training step under some plans on eight virtual devices, and prints what came of it as JSON.

It needs its own process, because the number of devices is fixed when JAX starts. Its arguments are names of CASES. Each
gives the losses of three steps on the mesh and of the same steps on one device in one batch in float32, the bytes that
the plan and the compiled program send, by kind and axes, and the operations of products on a device, in the step and in
its share alone, and the memory of a device.
"""

import json
import os
import sys

from tests.support.quick_xla import on_devices

os.environ["XLA_FLAGS"] = on_devices(8)
os.environ["JAX_PLATFORMS"] = "cpu"

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.support.sent_bytes import planned_bytes, reordered_bytes
from benchmarks.support.xla_program import compiled, on_device
from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.jax_layouts import jax_mesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.micro_batches import repeat_micro_batches
from costmodels.sharding.plan import cost_of, violations
from tests.support.programs.small_backends import cluster_of
from trials.jax_training.device_program import DeviceProgram
from trials.jax_training.model.initial import batch, initial_states
from trials.jax_training.model.sharded_step import ShardedStep
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.hand_made import hand_made
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step

GPT = load_model("configs/models/gpt-tiny.yaml", Path(__file__).parents[3]).changed(num_layers=1)
LLAMA = GPT.changed(
    name="llama-tiny",
    num_layers=2,
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
MOE = LLAMA.changed(
    name="moe-tiny",
    num_layers=1,
    num_experts=8,
    top_k=2,
    expert_ffn_size=64,
    num_shared_experts=1,
    shared_expert_ffn_size=128,
    shared_expert_gate=True,
    router_bias=True,
)
WIDE = {"num_layers": 1, "hidden_size": 256, "head_dim": 32, "ffn_size": 1024}
"""Sizes with which planners shard a model on processor cores."""
MODELS = {
    model.name: model
    for model in (GPT, LLAMA, MOE, GPT.changed(name="gpt-wide", **WIDE), LLAMA.changed(name="llama-wide", **WIDE))
}
PINNED = LayerPlanning(name="descent", pins=(Pin(op="layers.*.dense_mlp.up", dim="hidden", axis="tp"),))

EXPERTS_OVER_TP = LayerPlanning(
    name="descent", pins=tuple(Pin(op=f"*.moe_mlp.{op}", dim="experts", axis="tp") for op in ("up", "down"))
)


def job_of(model, precision="fp32"):
    """Build a job of one batch of eight sequences."""
    return TrainingJob(model=model, sequence_length=64, global_batch_size=8, precision=precision)


def of_study(model, planning=LayerPlanning(), precision="fp32", **degrees):  # noqa: B008 # it is frozen
    """Plan the step of a study's candidate, with one micro-batch unless the degrees say otherwise."""
    config = ParallelConfig(**{"mbs": 8 // degrees.get("dp", 1), **degrees})
    return plan_step(job_of(model, precision), cluster_of(8), config, planning)


def of_planner(name, planner):
    """Plan the graph of a step as `meshtune plan` does, on a mesh of two axes."""
    graph = transformer_graph(job_of(MODELS[name]), micro_batch_size=8)
    mesh = DeviceMesh(names=("data", "model"), sizes=(2, 4), cluster=cluster_of(8))
    return plan_graph(graph, mesh, PlannerOptions(planner=planner, whole_axes=True)).plan


def sharded_at_rest(model):
    """Plan a step of two micro-batches whose parameters are cut over replicas, which gather them in each pass."""
    graph = repeat_micro_batches(transformer_graph(job_of(model), micro_batch_size=4), 2)
    mesh = DeviceMesh(names=("dp", "tp"), sizes=(4, 2), cluster=cluster_of(8))
    return hand_made(graph, mesh, ParallelConfig(dp=4, tp=2, mbs=1), zero_stage=3)


CASES = {
    "gpt by hand, dp=8": lambda: of_study(GPT, dp=8),
    "gpt by hand, dp=2, tp=4": lambda: of_study(GPT, dp=2, tp=4),
    "gpt by hand, dp=4, tp=2, no sequence parallelism, no ZeRO": lambda: of_study(
        GPT, dp=4, tp=2, sequence_parallel=False, zero_stage=0
    ),
    "llama by hand, dp=2, cp=2, tp=2": lambda: of_study(LLAMA, dp=2, cp=2, tp=2),
    "llama by hand, dp=2, up=2, tp=2": lambda: of_study(LLAMA, dp=2, up=2, tp=2),
    "experts by hand, dp=8, ep=2": lambda: of_study(MOE, dp=8, ep=2),
    "gpt by hand, dp=2, tp=4, mbs=1": lambda: of_study(GPT, dp=2, tp=4, mbs=1),
    "gpt pinned, dp=2, tp=4, mbs=1": lambda: of_study(GPT, PINNED, dp=2, tp=4, mbs=1),
    "experts pinned to tp, dp=2, tp=4, mbs=2": lambda: of_study(MOE, EXPERTS_OVER_TP, dp=2, tp=4, mbs=2),
    "llama by hand, dp=2, cp=2, tp=2, bf16": lambda: of_study(LLAMA, dp=2, cp=2, tp=2, precision="bf16"),
    "experts by hand, dp=2, cp=2, tp=2, ep=2, mbs=2": lambda: of_study(MOE, dp=2, cp=2, tp=2, ep=2, mbs=2),
    "experts by hand, dp=2, cp=2, tp=2, ep=2, mbs=2, bf16": lambda: of_study(
        MOE, dp=2, cp=2, tp=2, ep=2, mbs=2, precision="bf16"
    ),
    "gpt by hand, dp=4, tp=2, mbs=1, sharded parameters": lambda: sharded_at_rest(GPT),
    "gpt by D-Rec": lambda: of_planner("gpt-wide", "recursive"),
    "llama by descent": lambda: of_planner("llama-wide", "descent"),
    "gpt by TOAST": lambda: of_planner("gpt-wide", "toast"),
}


def step_of(plan):
    """Return the step of a plan on the first devices."""
    return ShardedStep.of(plan, jax_mesh(plan), top_k=MODELS[plan.graph.name].top_k)


def losses_of(plan, program):
    """Run three steps from the initial states."""
    step = step_of(plan)
    states = initial_states(plan.graph, 0, step.shardings(STATE))
    inputs = batch(plan.graph, 0, step.shardings(INPUT))
    losses = []
    for number in (1, 2, 3):
        states, loss = program(states, np.float32(number), inputs)
        losses.append(float(loss))
    return losses


@cache
def plain_losses(name):
    """Run the steps of a model on one device."""
    plan = of_study(MODELS[name])
    return losses_of(plan, step_of(plan).compile())


def found(plan):
    """Return losses and bytes under a plan."""
    graph, mesh = plan.graph, plan.mesh
    step = step_of(plan)
    axes = dict(zip(mesh.names, mesh.sizes, strict=True))
    read = compiled(step.lower(), axes)
    alone = on_device(DeviceProgram.of(read.text).alone, axes)
    planned = planned_bytes(cost_of(plan), mesh) + reordered_bytes(step.layouts.orders)
    return {
        "losses": losses_of(plan, read.run),
        "plain": plain_losses(graph.name),
        "planned": _by_name(planned),
        "compiled": _by_name(read.device.sent),
        "violations": violations(plan),
        "flop": read.device.flop,
        "memory_bytes": read.memory_bytes,
        "alone": {"flop": alone.flop, "sent": _by_name(alone.sent)},
    }


def _by_name(sent):
    return {f"{kind} {'*'.join(axes)}": num_bytes for (kind, axes), num_bytes in sent.items() if num_bytes > 0}


if __name__ == "__main__":
    print(json.dumps({name: found(CASES[name]()) for name in sys.argv[1:]}))  # noqa: T201 # what the test reads
