"""Original prices of D-Rec: volumes alone, without latency, links or arithmetic ("purely symbolic").

They apply to the operators of a forward pass. Each tensor of an operator that a level does not cut has to be added up
there, in the forward pass or in the backward pass. For a product (i, k) x (k, j) -> (i, j), cutting i leaves partial
sums of the gradient of (k, j), cutting j those of the gradient of (i, k), and cutting k those of (i, j) itself. C_local
is therefore a multiple of the bytes that stay whole. An operator that nothing cuts counts all its tensors, so that
replication is never free. Products and attention have to be cut wherever they can be.

A tensor between two operators is counted in one of two readings. `by_kind` counts the volume of the collective that
stands there (ManuMatic, section 2.3 as printed, where whole to cut counts as a reduce-scatter). `by_coefficient` counts
the tensor times a coefficient if both ends differ at all.

Sources: MindSpore, rec_core/rec_cost.h (StrConcatDimI, StrConcatDimJ and StrReduceDimK are half the tensor without the
cut factor; REDIS_COEF is 16) and rec_cost.cc (CostMatMul::ChoseStr knows no uncut product); ManuMatic, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Op
from tuner.planners.sharding.recursive import AbstractPrices, Level, Redistribution, Work

Reading = Literal["by_coefficient", "by_kind"]
"""Rule that counts a mismatch between two operators."""
READINGS: tuple[Reading, ...] = get_args(Reading)
"""All such rules."""

REDISTRIBUTION_COEFFICIENT = 16.0
"""Weight of a redistributed tensor, REDIS_COEF of rec_cost.h."""
LOCAL_COEFFICIENT = 0.5
"""Weight of a tensor that stays whole in C_local."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volumes(AbstractPrices):
    """Prices in bytes.

    Attributes:
        reading: Rule that counts a mismatch between two operators.
    """

    reading: Reading = "by_coefficient"

    def may_replicate(self, op: Op) -> bool:
        """Return whether the operator does hardly any arithmetic; MindSpore's planner has no node for such ones."""
        return not op.precision

    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:  # noqa: ARG002 # of the contract
        """Return half the bytes of all tensors that the level leaves whole, or the volume of an all-reduce of them."""
        whole_bytes = sum(
            num_bytes
            for num_bytes, is_cut in (
                *zip(work.read_bytes, work.cuts_read, strict=True),
                *zip(work.written_bytes, work.cuts_written, strict=True),
            )
            if not is_cut
        )
        return whole_bytes * (LOCAL_COEFFICIENT if self.reading == "by_coefficient" else 2.0 * _sent_share(level))

    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:  # noqa: ARG002 # of the contract
        """Return the price of each mismatch; partial sums count as whole, since their operator has paid for that."""
        if self.reading == "by_coefficient":
            moved = REDISTRIBUTION_COEFFICIENT * num_bytes
            return Redistribution(gather_s=moved, exchange_s=moved, sum_s=0.0, scatter_s=moved, slice_s=moved)
        moved = _sent_share(level) * num_bytes
        return Redistribution(gather_s=moved, exchange_s=moved / level.ways, sum_s=0.0, slice_s=moved)


def _sent_share(level: Level) -> float:
    """Return the fraction of a tensor that a device sends in a ring, to gather it or to scatter it."""
    return (level.ways - 1) / level.ways
