"""D-Rec's own prices: volumes alone, without latency, links or arithmetic ("purely symbolic").

They are for the operators of a forward pass. Whatever tensor of an operator a level does not cut has to be added up
there, in the forward pass or in the backward pass: of a product (i, k) x (k, j) -> (i, j), cutting i leaves partial
sums of the gradient of (k, j), cutting j those of the gradient of (i, k), and cutting k those of (i, j) itself. So
C_local is a multiple of the bytes that stay whole. An operator that nothing cuts counts all its tensors, so that to
replicate is never for free; products and attention have to be cut wherever they can be.

A tensor between two operators counts by one of two readings. `by_kind`: the volume of the collective that stands there
(ManuMatic section 2.3 as printed, where whole to cut counts as a reduce-scatter). `by_coefficient`: so many times the
tensor if both ends differ at all.

Sources: MindSpore, rec_core/rec_cost.h (StrConcatDimI, StrConcatDimJ and StrReduceDimK are half the tensor without the
cut factor; REDIS_COEF is 16) and rec_cost.cc (CostMatMul::ChoseStr knows no uncut product); ManuMatic section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Op
from tuner.planners.sharding.recursive import AbstractPrices, Level, Redistribution, Work

Reading = Literal["by_coefficient", "by_kind"]
READINGS: tuple[Reading, ...] = get_args(Reading)

REDISTRIBUTION_COEFFICIENT = 16.0
"""REDIS_COEF of rec_cost.h; beside it stands half a tensor for C_local."""
LOCAL_COEFFICIENT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Volumes(AbstractPrices):
    """Bytes.

    Attributes:
        reading: What a mismatch between two operators counts.
    """

    reading: Reading = "by_coefficient"

    def may_replicate(self, op: Op) -> bool:
        """Whether it does no arithmetic to speak of; the planner in MindSpore has no node for such."""
        return not op.precision

    def own_s(self, op: Op, work: Work, mesh: DeviceMesh, level: Level) -> float:  # noqa: ARG002 # of the contract
        """Of all tensors that the level leaves whole: half their bytes, or an all-reduce of them."""
        whole_bytes = sum(
            num_bytes
            for num_bytes, is_cut in (
                *zip(work.read_bytes, work.cuts_read, strict=True),
                *zip(work.written_bytes, work.cuts_written, strict=True),
            )
            if not is_cut
        )
        return whole_bytes * (LOCAL_COEFFICIENT if self.reading == "by_coefficient" else 2.0 * _sent(level))

    def redistribution(self, num_bytes: float, mesh: DeviceMesh, level: Level) -> Redistribution:  # noqa: ARG002 # of the contract
        """What a mismatch counts; partial sums are whole, since their operator has paid for that."""
        if self.reading == "by_coefficient":
            moved = REDISTRIBUTION_COEFFICIENT * num_bytes
            return Redistribution(gather_s=moved, exchange_s=moved, sum_s=0.0, scatter_s=moved, slice_s=moved)
        moved = _sent(level) * num_bytes
        return Redistribution(gather_s=moved, exchange_s=moved / level.ways, sum_s=0.0, slice_s=moved)


def _sent(level: Level) -> float:
    """The part of a tensor that a device sends in a ring, to gather it or to scatter it."""
    return (level.ways - 1) / level.ways
