"""Plans of whole training steps of a study's candidates, as trials run them.

The plan by hand is made on the whole step. Any other plan is found for layers of the candidate's shape
(`layer_plans.py`), on two layers and without data parallelism, and is carried over to the step: the first layer and all
operators outside of layers keep theirs, every further layer gets that of the last planned one of its kind. `dp` cuts
the batch, and ZeRO its states, as in the plan by hand.
"""

from __future__ import annotations

import math

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.frontends.transformer.training_step import MASTER
from costmodels.sharding.graph import Graph
from costmodels.sharding.micro_batches import repeat_micro_batches
from costmodels.sharding.plan import NONE, Plan, violations
from hardware.cluster import Cluster
from tuner.planners.sharding.hand_made import EXPERT_AXIS, hand_made
from tuner.planners.sharding.layer_axes import layer_axes
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.layer_plans import plan_layer
from tuner.plans.layer_tasks import LayerTask

_STATES = frozenset((MASTER, *(moment for one in OPTIMIZERS.values() for moment in one.moments)))
"""Last part of the names of an optimizer's states."""


def plan_step(job: TrainingJob, cluster: Cluster, config: ParallelConfig, planning: LayerPlanning) -> Plan:
    """Return the plan of one optimizer step of a model with one pipeline stage.

    The graph is that of one micro-batch of all replicas, whose operators run as often as there are micro-batches, and
    of the update. The part of `dp` over which experts are distributed is an axis of its own, `dp_experts`.

    Args:
        job: Training job of the candidate.
        cluster: Cluster of the candidate.
        config: Candidate, valid under the rules of a runtime of planned steps.
        planning: Planner of the layers, and its pins.
    """
    # a study can switch rules off, and a plan of another step would be measured in silence
    num_micro_batches, rest = divmod(job.global_batch_size, config.dp * config.mbs)
    assert rest == 0, f"{config} has equal micro-batches, as the runtime demands"
    assert (config.pp, config.vpp) == (1, 1), f"{config} has one stage"
    assert config.zero_stage in (0, 1), f"{config} has no ZeRO stage that the runtime offers"
    assert config.recompute == "none", f"{config} recomputes nothing, as the runtime demands"
    dealt = (layer_axes(config) or {}).get("dp", 1)
    degrees = {"dp": config.dp // dealt, EXPERT_AXIS: dealt, "cp": config.cp, "up": config.up, "tp": config.tp}
    axes = {name: size for name, size in degrees.items() if size > 1} or {"dp": 1}
    graph = transformer_graph(
        job, micro_batch_size=config.mbs * config.dp, optimizer=job.optimizer, has_masters=not job.is_single
    )
    graph = repeat_micro_batches(graph, num_micro_batches)
    mesh = DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=cluster)
    if mesh.num_devices == 1:
        return Plan(graph=graph, mesh=mesh, served=np.full((len(graph.ops), 1), NONE, dtype=np.int64))
    by_hand = hand_made(graph, mesh, config, zero_stage=config.zero_stage)
    assert by_hand is not None, f"the rules leave out candidates without a plan by hand, such as {config}"
    if planning.name == "megatron":
        return by_hand
    task = LayerTask(job=job, cluster=cluster, config=config, num_micro_batches=num_micro_batches, planning=planning)
    layer = plan_layer(task)
    assert layer is not None, "the layers of a step with a plan by hand have one too"
    plan = _carry_over(layer.found, by_hand)
    wrong = violations(plan)
    assert not wrong, wrong[0]
    return plan


def _carry_over(layer: Plan, by_hand: Plan) -> Plan:
    """Return a plan of the step with the rows of a plan of its layers, and the `dp` of the plan by hand."""
    rows = dict(zip((op.name for op in layer.graph.ops), layer.served.tolist(), strict=True))
    names, graph = by_hand.mesh.names, by_hand.graph
    served = by_hand.served.copy()
    for number, op in enumerate(graph.ops):
        # of dp, a layer has the part over which experts are distributed
        own = [EXPERT_AXIS if name == "dp" else name for name in layer.mesh.names]
        row = dict(zip(own, rows[_planned_name(op.name, rows)], strict=True))
        for axis, name in enumerate(names):
            if name in row:
                served[number, axis] = row[name]
        if "dp" in names:
            axis = names.index("dp")
            served[number, axis] = _fitting(graph, number, served[number].tolist(), axis, by_hand.mesh.sizes)
    return Plan(graph=graph, mesh=by_hand.mesh, served=served)


def _planned_name(name: str, rows: dict[str, list[int]]) -> str:
    """Return the name of the planned operator that an operator of the step follows."""
    # layers are planned with the default optimizer's moments, as which all other states of an optimizer lie
    parameter, _, label = name.rpartition(".")
    if label in _STATES:
        name = f"{parameter}.{OPTIMIZERS[DEFAULT_OPTIMIZER].moments[0]}"
    if name in rows:
        return name
    assert name.startswith("layers."), f"{name!r} is in a layer beyond the planned ones"
    inside = name.split(".", 2)[2]
    # the last planned layer with such an operator: its output has the gradients of two readers only in earlier ones
    alike = [planned for planned in rows if planned.startswith("layers.") and planned.split(".", 2)[2] == inside]
    return max(alike, key=lambda planned: int(planned.split(".", 2)[1]))


def _fitting(graph: Graph, number: int, row: list[int], axis: int, sizes: tuple[int, ...]) -> int:
    """Return the factor that an axis serves beside the others of a row: its own, or else the first that it divides."""
    rule, own = graph.ops[number].rule, row[axis]
    if own == NONE:
        return NONE

    def divides(factor: int) -> bool:
        ways = math.prod(size for at, size in enumerate(sizes) if at != axis and row[at] == factor)
        return rule.factors[factor].size % (ways * sizes[axis]) == 0

    return next((factor for factor in (own, *rule.cuttable) if divides(factor)), NONE)
