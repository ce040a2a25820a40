"""Prices of the memory that tensors take, where each byte that is alive at an operator costs something.

A tensor takes memory in its own layout, in every other layout that is kept for its readers, and whole while it consists
of partial sums. The time for which it is alive depends only on the layouts of its maker and readers. Its price is
therefore a term of the tensor, as its moves are. The sum over all tensors is `costmodels.sharding.plan.live_bytes` of a
plan, times the prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import Lifetime, fused_on, lifetimes
from costmodels.sharding.graph import CONSTANT, Graph
from costmodels.sharding.layouts import REPLICATED
from tuner.planners.engine.elimination import Table

BytePrices = Mapping[int, float]
"""Price of a byte that a device holds while an operator runs, by operator [s per byte]; other operators have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePrice:
    """Price of a copy that a use needs.

    Attributes:
        op: Number of the operator, counted from the tensor's first reader.
        own_s: Price of a byte while the operator runs [s]; None where the use needs no copy.
        until_s: Price of a byte from the first reader to the end of this operator [s].
    """

    op: int
    own_s: float | None
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPrice:
    """Price of a tensor's memory.

    Attributes:
        held_s: Price of a byte for the tensor's lifetime [s].
        written_s: Price of a byte while the tensor is written [s].
        uses: Prices of its copies, use by use.
        is_made_anew: Whether no copy is kept, because every reader can make it.
    """

    held_s: float
    written_s: float
    uses: tuple[UsePrice, ...]
    is_made_anew: bool


def tensor_prices(graph: Graph, mesh: DeviceMesh, byte_s: BytePrices) -> tuple[TensorPrice | None, ...]:
    """Return the price of each tensor on a mesh; None for a tensor that costs nothing in any layout."""
    own_s = np.zeros(len(graph.ops))
    own_s[list(byte_s)] = list(byte_s.values())
    # Running sums of the prices give the price of any range of operators as a difference.
    until_s = np.concatenate(([0.0], np.cumsum(own_s)))
    lives = lifetimes(fused_on(graph, mesh))
    return tuple(_price(graph, tensor, lifetime, own_s, until_s) for tensor, lifetime in enumerate(lives))


def _price(graph: Graph, tensor: int, lifetime: Lifetime | None, own_s: Table, until_s: Table) -> TensorPrice | None:
    """Return the price of a tensor; None if it costs nothing in any layout."""
    maker, _ = graph.maker[tensor]
    uses = graph.uses[tensor]
    # Operators are counted from the first reader, so that tensors of repeated layers have equal prices.
    first = uses[0].op if uses else maker
    found = TensorPrice(
        held_s=0.0 if lifetime is None else float(until_s[lifetime.last + 1] - until_s[lifetime.first]),
        written_s=float(own_s[maker]),
        uses=tuple(
            UsePrice(
                op=use.op - first,
                own_s=None if use.is_back else float(own_s[use.op]),
                until_s=float(until_s[use.op + 1] - until_s[first + 1]),
            )
            for use in uses
        ),
        is_made_anew=graph.ops[maker].primitive == CONSTANT,
    )
    is_free = not (found.held_s or found.written_s or any(use.own_s or use.until_s for use in found.uses))
    return None if is_free else found


def price_table(
    price: TensorPrice, written: Any, lies: Any, wanted: Sequence[Any], is_again: Sequence[bool], mesh: DeviceMesh
) -> Table:
    """Compute the price of a tensor of one byte, for arrays of layouts [..., axes] that broadcast [s per byte].

    Args:
        price: Prices of the tensor's lifetime and uses.
        written: Layout of the tensor as its maker leaves it.
        lies: Layout once partial sums are added up.
        wanted: Layout that each use asks for.
        is_again: Whether each use needs copies of its own, as in the backward pass.
        mesh: Mesh of the layouts.
    """
    sizes = np.array(mesh.sizes, dtype=np.float64)

    def share(layout: Any) -> Any:
        """Return the fraction of a tensor that a device holds in a layout."""
        return 1.0 / np.where(layout >= 0, sizes, 1.0).prod(axis=-1)

    # Partial sums are held in their own layout only while the tensor is written.
    table = price.held_s * share(lies) + price.written_s * (share(written) - share(lies))
    # A copy that was sent is paid from its previous reader on. A copy that costs no message is made anew for each
    # operator.
    for number, use in enumerate(price.uses):
        if use.own_s is None:
            continue
        since_s: Any = use.own_s  # as the first to read the copy
        fresh_s: Any = use.own_s
        for earlier, other in enumerate(price.uses[:number]):
            if other.own_s is not None and is_again[earlier] == is_again[number]:
                is_same = (wanted[earlier] == wanted[number]).all(axis=-1)
                since_s = np.where(is_same, use.until_s - other.until_s, since_s)
                if other.op == use.op:
                    fresh_s = np.where(is_same, 0.0, fresh_s)
        if price.is_made_anew:
            is_sent: Any = np.array(False)
        else:
            is_sliced = (lies == REPLICATED) & (wanted[number] >= 0)
            is_sent = ((lies != wanted[number]) & ~is_sliced).any(axis=-1)
        is_copy = (lies != wanted[number]).any(axis=-1)
        table = table + np.where(is_copy, np.where(is_sent, since_s, fresh_s) * share(wanted[number]), 0.0)
    found: Table = np.asarray(table, dtype=np.float64)
    return found
