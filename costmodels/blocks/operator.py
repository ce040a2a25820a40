"""Operators of a block under a configuration, with their shapes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hardware.arrays import FloatArray


class OpKind(StrEnum):
    """Kinds of operators and collectives; each has its own model of the time, and its own surrogate."""

    MATMUL = "matmul"
    GROUPED_MATMUL = "grouped_matmul"
    ATTENTION = "flash_attention"
    SCAN = "scan"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


COLLECTIVES = frozenset(
    {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL, OpKind.SEND_RECV}
)
"""Kinds of collectives, whose shape is (message bytes, group size, hosts)."""


class Family(StrEnum):
    """Families of blocks: the places in a model where a block may stand."""

    MIXER = "mixer"
    MLP = "mlp"
    EXPERTS = "experts"
    TOWER = "tower"
    EMBEDDING = "embedding"
    HEAD = "head"


LAYER_FAMILIES = (Family.MIXER, Family.MLP, Family.EXPERTS)
"""Families of the blocks that belong to layers. Full recomputation runs them again."""


class Phase(StrEnum):
    """Pass in which an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operator:
    """One operator of a block, for every unique shape row.

    Attributes:
        name: Name made of block and role, for example `attention.qkv`.
        kind: Kind of operator, which selects the kernel model.
        block: Name of the block that the operator belongs to.
        family: Family of that block.
        phase: Phase, forward or backward.
        shape: Columns of sizes [u, d]: (m, k, n) of a matmul or of a scan's products, (groups, m, k, n) of a grouped
            matmul, (batch, heads, query length, key length, head size) of attention, (rows, columns) of a norm,
            (elements,) else.
        precision: Type of the operator's arithmetic.
        flop: Number of floating-point operations [u].
        moved_bytes: Number of bytes read and written [u].
        modules: Names of the modules by which selective recomputation can repeat the operator.
        is_core: Whether the operator stands between the projections of a mixer, so that it depends on mbs, cp and up
            themselves.
        kept_share: Share of its result that remains if attention and every second product of a layer are kept [u].
    """

    name: str
    kind: OpKind
    block: str
    family: Family
    phase: Phase
    precision: str
    shape: FloatArray
    flop: FloatArray
    moved_bytes: FloatArray
    modules: tuple[str, ...] = ()
    is_core: bool = False
    kept_share: FloatArray | float = 0.0

    @property
    def role(self) -> str:
        """Name without the block."""
        return self.name.partition(".")[2]
