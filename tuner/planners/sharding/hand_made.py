"""Plans as frameworks write them by hand, for a candidate's degrees: Megatron's, with context and Ulysses parallelism.

Every axis is named after its degree. `tp` cuts heads, ffn and vocabulary (Shoeybi et al. 2019, section 3); with
sequence parallelism it cuts the operators between them by the sequence (Korthikanti et al. 2022, section 4.2.2). `cp`
and `up` cut the sequence, but in the attention core `up` cuts the heads (Jacobs et al. 2023), and in the core of a
mixer with a state, which runs along the whole sequence, both do (megatron-core ssm/mamba_context_parallel.py). `dp`
cuts the batch.
Experts are distributed over ranks, neighbours first: the fastest axes cut their ffn as far as `expert_tp` goes, and the
next ones cut the experts. Other axes that cut the sequence or the batch also cut the tokens in the slots of experts.
Keys and values are gathered where frameworks pass them around a ring; both send the same bytes.

Moments and updates are cut by the axes that a parameter leaves free (ZeRO 1), whatever the candidate does, unless the
caller names another stage. Gradients are then scattered and parameters gathered, which sends as much as an all-reduce
of the gradients. Without it, every other plan would be credited with updates that it does not repeat, which the cost
model already accounts for.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.named_plans import ByName, plan_by_names
from costmodels.sharding.plan import NONE, Plan
from tuner.planners.sharding.forward_plans import forward_of, with_backward
from tuner.planners.sharding.layer_axes import expert_factors

BATCH, HEADS = ("batch",), ("kv_heads", "heads", "query_groups", "state_heads")
TENSOR = (*HEADS, "ffn", "shared_ffn", "vocabulary", "joined")
"""Factors that tensor parallelism cuts."""
EXPERT_AXIS = "dp_experts"
"""Axis of the part of `dp` over which experts are distributed, where the rest of it is an axis, too."""
ALONG = ("sequence", "queries", "chunks", "slots")
"""Factors that context, Ulysses and sequence parallelism cut."""
EXPERT_OPS = tuple(
    f"*.{block}.{role}"
    for block in ("moe_mlp", "moe_mlp_?")
    for role in ("up", "down", "activation", "up_bias", "down_bias")
)
"""Operators inside the experts."""
BETWEEN = ("*norm", "*residual", "*_down", "*out_bias", "*.dense_mlp*down_bias")
"""Operators between the tensor-parallel ones, which sequence parallelism cuts by the sequence."""
CORE, OF_HEADS = "*.core*", "*_add_norm"
"""Operators between the projections of a mixer, and norms of heads before attention."""


def hand_made(graph: Graph, mesh: DeviceMesh, config: ParallelConfig, *, zero_stage: int = 1) -> Plan | None:
    """Return the plan of a training step of the transformer frontend.

    Args:
        graph: Graph of the training step.
        mesh: Mesh with the axes of `layer_axes`, and perhaps with `dp` in two: the rest of it, and EXPERT_AXIS.
        config: Parallelism degrees of the candidate.
        zero_stage: Stage of ZeRO: 0, 1 or 3.

    Returns:
        None where no plan of these axes expresses what frameworks do: they copy key heads where there are fewer heads
            than ranks, and pad the vocabulary.
    """
    experts = expert_factors(dict(zip(mesh.names, mesh.sizes, strict=True)), config) or {}
    tensor: ByName = [("*", TENSOR)]
    if config.sequence_parallel:
        own = [(name, TENSOR) for name in (CORE, OF_HEADS)]
        tensor = [*own, *((name, ALONG) for name in BETWEEN), ("*.moe_mlp*", ("shared_ffn", *ALONG)), *tensor]
    by_degree: dict[str, ByName] = {
        "dp": [("*", BATCH)],
        EXPERT_AXIS: [("*", BATCH)],
        "cp": [(CORE, ("queries", "state_heads")), ("*", ALONG)],
        "up": [(CORE, HEADS), ("*", ALONG)],
        "tp": tensor,
    }
    axes = {
        name: [*((op, experts[name]) for op in EXPERT_OPS if name in experts), *by_degree[name]] for name in mesh.names
    }
    forward = plan_by_names(forward_of(graph), mesh, axes, shared=("experts", *BATCH, *HEADS, *ALONG))
    if not all(_is_served(forward, number, axes) for number, op in enumerate(forward.graph.ops) if op.flop > 0):
        return None
    return with_backward(graph, forward, zero_stage=zero_stage)


def _is_served(plan: Plan, number: int, axes: Mapping[str, ByName]) -> bool:
    """Return whether every axis that has a factor in an operator serves one there."""
    op, row = plan.graph.ops[number], plan.served[number].tolist()
    names = {factor.name for factor in op.rule.factors}
    wanted = (next((found for pattern, found in axes[name] if fnmatchcase(op.name, pattern)), ()) for name in axes)
    return all(factor != NONE or names.isdisjoint(found) for factor, found in zip(row, wanted, strict=True))
