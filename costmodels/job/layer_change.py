"""Changes of a sharding plan to the layers of one shape, relative to the plan that frameworks write by hand.

The cost model prices Megatron's plan operator by operator, with the overlap of the runtime. A planner's plan is priced
against that one by `costmodels.sharding.plan.cost_of`, both on the same graph and mesh. Its differences are ratios: of
the compute of each block and pass, and of the communication of each part of the step's breakdown where it is less.
So a plan equal to Megatron's changes nothing, and the runtime hides the same share of Megatron's remaining collectives.
Further communication of a plan is added and hidden by nothing: a runtime that sends keys beside attention need not be
able to send anything else there.

Memory changes in what layers keep of a micro-batch for its backward pass, again as a ratio. What a plan holds of
weights, moments and gradients is never more than what Megatron's plan holds, and counts like that.

Letters: B blocks, in the order of `LayerChange.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.job.parallel_config import PLANS

PLANNED_BLOCKS = ("attention", "dense_mlp", "moe_mlp", "embedding", "head")
"""Names of the blocks of a plain decoder, which come first among those that plans shard."""

ByBlock = tuple[float, ...]
"""Numbers, one for each block."""

SHAPE = ("tp", "cp", "up", "ep", "expert_tp", "mbs", "sequence_parallel")
"""Names of the dimensions that determine a layer's mesh and its tensors."""
KEYS = (*SHAPE, "plan")
"""Names of the dimensions of the candidates that a change applies to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChange:
    """Changes of a plan to layers of one shape.

    Attributes:
        tp, cp, up, ep, expert_tp, mbs, sequence_parallel: Values of the dimensions of the shape.
        plan: Name of the plan.
        compute: Compute time over that of Megatron's plan, of the forward and of the backward pass [2][B].
        exposed: Communication over that of Megatron's plan, for each of EXPOSED_PARTS in costmodels/step/breakdown.py
            [4][B]; 1 where it is more.
        added_s: Time of further communication, by pass and part, at the links' full speed [2][4][B] [s per
            micro-batch].
        once_s: Time of the collectives of weights and gradients once a step, minus that of Megatron's plan, at the
            links' full speed [B] [s].
        kept: Activations that a micro-batch keeps over those of Megatron's plan [B]; empty in changes that were stored
            before these were known.
        entry: Input of a layer, which full recomputation keeps, over that of Megatron's plan.
        blocks: Names of the blocks [B], those of the model's own kinds last; `ModelSpec.planned_names`.
    """

    tp: int
    cp: int
    up: int
    ep: int
    expert_tp: int
    mbs: int
    sequence_parallel: bool
    plan: str
    compute: tuple[ByBlock, ...]
    exposed: tuple[ByBlock, ...]
    added_s: tuple[tuple[ByBlock, ...], ...]
    once_s: ByBlock
    kept: ByBlock = ()
    entry: float = 1.0
    blocks: tuple[str, ...] = PLANNED_BLOCKS

    @property
    def key(self) -> tuple[int, ...]:
        """Values of the dimensions in KEYS, as codes of a grid."""
        return (*self.shape, PLANS.index(self.plan))

    @property
    def shape(self) -> tuple[int, ...]:
        """Values of the dimensions in SHAPE."""
        return tuple(int(getattr(self, name)) for name in SHAPE)
