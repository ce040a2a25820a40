"""Links that groups of ranks cross, and the time of each collective on them.

Letters in shapes: g groups of ranks that are asked about, u kinds of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.algorithms import LINKS, SIZES, CostLines, GroupKinds, cost_lines, join_kinds, join_lines
from hardware.arrays import FloatArray, IntArray
from hardware.link import LinkCost

WorstLinks = tuple[tuple[int, int, int, int, int], FloatArray]
"""The five sizes of `GroupKinds` for groups of one kind, and the cost of each of their links [4, fields]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLinks:
    """Links and collective times of groups of ranks, one entry for each of g groups.

    Entries with the same (stride, size) are equal and there are few such kinds, so an entry is the number of its kind.

    Attributes:
        kinds: Sizes and links of each kind of group [u].
        lines: Time of each collective on each kind of group.
        row: Number of the kind of every entry, [g].
    """

    kinds: GroupKinds
    lines: CostLines
    row: IntArray

    @property
    def size(self) -> IntArray:
        """Number of ranks in a group, [g]."""
        return self.kinds.size.take(self.row)

    @property
    def domains(self) -> IntArray:
        """Largest number of domains that a group spans, [g]."""
        return self.kinds.domains.take(self.row)

    @property
    def switches(self) -> IntArray:
        """Largest number of leaf switches that a group spans, [g]."""
        return self.kinds.switches.take(self.row)

    def take(self, index: NDArray[Any]) -> GroupLinks:
        """Select the entries at `index`, integers or a mask, in its order."""
        return GroupLinks(kinds=self.kinds, lines=self.lines, row=self.row[index])

    def where(self, chosen: NDArray[np.bool_], other: GroupLinks) -> GroupLinks:
        """Return these entries, replaced by those of `other` where `chosen` is true [g]."""
        kinds, lines = join_kinds(self.kinds, other.kinds), join_lines(self.lines, other.lines)
        row = np.where(chosen, other.row + len(self.kinds.size), self.row)
        return GroupLinks(kinds=kinds, lines=lines, row=row)

    def split(self, parts: int) -> list[GroupLinks]:
        """Split the entries into equal parts, one after the other."""
        return [GroupLinks(kinds=self.kinds, lines=self.lines, row=row) for row in np.split(self.row, parts)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageLinks:
    """Links between neighbouring stages of the pipelines of g configurations; boundaries of one kind have equal links.

    Attributes:
        kinds: Links of each kind of boundary [u], each [g].
        of_boundary: Kind of the boundary behind each stage but the last [pp - 1], by the number of stages.
    """

    kinds: tuple[GroupLinks, ...]
    of_boundary: Mapping[int, IntArray]


def stack_links(found: Sequence[WorstLinks], row: IntArray) -> GroupLinks:
    """Stack the answers for each kind of group as arrays, and compute their lines."""
    # [kind of group, size], and [kind of group, link, field of LinkCost]
    sizes = np.array([row for row, _ in found], dtype=np.int64).reshape(-1, len(SIZES))
    costs = np.array([row for _, row in found]).reshape(-1, len(LINKS), len(LinkCost._fields))
    links = [LinkCost(*cost.T) for cost in costs.swapaxes(0, 1)]
    by_name: dict[str, Any] = dict(zip((*SIZES, *LINKS), (*sizes.T, *links), strict=True))
    kinds = GroupKinds(**by_name)
    return GroupLinks(kinds=kinds, lines=cost_lines(kinds), row=row)


def distinct_links(every: Sequence[WorstLinks]) -> tuple[list[WorstLinks], list[int]]:
    """Return the distinct ones of some links, and the number of each among these."""
    numbers: dict[bytes, int] = {}
    found, kinds = [], []
    for sizes, costs in every:
        key = np.array(sizes).tobytes() + costs.tobytes()
        if key not in numbers:
            numbers[key] = len(numbers)
            found.append((sizes, costs))
        kinds.append(numbers[key])
    return found, kinds


def worst_of(links: Sequence[WorstLinks]) -> WorstLinks:
    """Return the worst of the sizes and costs of groups of one size."""
    size, domains, least, most, switches = zip(*(sizes for sizes, _ in links), strict=True)
    costs = np.max([cost for _, cost in links], axis=0)
    return (size[0], max(domains), min(least), max(most), max(switches)), costs
