"""What a sharding plan changes of the layers of one shape, beside the plan that frameworks write by hand.

The cost model prices Megatron's plan: operator by operator, with what the runtime overlaps. A planner's plan is priced
against that one by `costmodels.sharding.plan.cost_of`, both on the same graph and mesh, and what it does otherwise is
told as
ratios: of the compute of each block and pass, and of what each part of the step's breakdown communicates there where
that is less. So a plan that is Megatron's changes nothing, and what a runtime hides of Megatron's collectives it hides
of what is left of them. What a plan communicates beyond them is added, and hidden by nothing: that a runtime sends keys
beside attention does not say that it could send anything else there.

Letters: B blocks, in the order of costmodels.operators.layer_operators.BLOCKS.
"""

from __future__ import annotations

from dataclasses import dataclass

ByBlock = tuple[float, ...]
"""A number for each of costmodels.operators.layer_operators.BLOCKS."""

KEYS = ("tp", "cp", "up", "ep", "expert_tp", "mbs", "sequence_parallel")
"""The dimensions that make a layer's mesh and its tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChange:
    """What a plan changes of layers of one shape.

    Attributes:
        tp, cp, up, ep, expert_tp, mbs, sequence_parallel: The shape.
        compute: Compute over that of Megatron's plan, of the forward and of the backward pass [2][B].
        exposed: What is communicated over that of Megatron's plan, of each of EXPOSED_PARTS in
            costmodels/step/breakdown.py [4][B]; 1 where it is more.
        added_s: What is communicated beyond that, by pass and part, at the links' full speed [2][4][B] [s per
            micro-batch].
        once_s: What collectives of weights and gradients take once a step, less what they take in Megatron's plan, at
            the links' full speed [B] [s].
    """

    tp: int
    cp: int
    up: int
    ep: int
    expert_tp: int
    mbs: int
    sequence_parallel: bool
    compute: tuple[ByBlock, ...]
    exposed: tuple[ByBlock, ...]
    added_s: tuple[tuple[ByBlock, ...], ...]
    once_s: ByBlock

    @property
    def key(self) -> tuple[int, ...]:
        """The shape's values of KEYS."""
        return tuple(int(getattr(self, name)) for name in KEYS)
