"""Coarsen the graph of a captured program: merge its operators into few groups, as the search for a schedule asks.

A group runs as one operator. Groups must not wait for each other in a circle, so two of them merge only if no further
path leads from one to the other.

    loops       All operators of a loop are one group, because its iterations take turns.
    constants   They are in no group: every device computes them for itself. So does it with what follows from small
                inputs and constants alone, such as a step's number and its powers; these are in a group, but nobody
                waits for them.
    states      Operators that read or write the same parameter or moment share a device (`homes`).
    cheap       A group that takes less than a hundredth of its share of the time merges with the neighbour with which
                it exchanges most bytes.
    chains      So does the cheapest group while there are too many. Groups of two homes do not merge: groups that
                overlap in part would soon bind all operators to one device. Where only such neighbours are left, the
                home with the least time and memory first joins the one with which it exchanges most bytes.

The idea of merging the ends of an edge level by level, without circles, is that of acyclic partitioning (Herrmann et
al. 2019, "Multilevel Algorithms for Acyclic Partitioning of Directed Acyclic Graphs").

Letters: G groups.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodels.sharding.graph import CONSTANT, STATE, Graph, TensorKind

CHEAP_SHARE = 0.01
"""Share of an equal part of all time below which a group is no operator of its own (assumed)."""

COPIED_BYTES = 64
"""Largest array that each device computes for itself: numbers of steps, keys of random numbers (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coarse:
    """A coarsened graph.

    Attributes:
        groups: Operators of each group in the order of the graph; a group stands after those that it reads from [G].
        homes: Sets of groups that share a device, because they read or write the same states.
        cuts: Tensors that one group hands to another, by the numbers of both.
    """

    groups: tuple[tuple[int, ...], ...]
    homes: tuple[tuple[int, ...], ...]
    cuts: dict[tuple[int, int], tuple[int, ...]]


def coarsen(graph: Graph, seconds: Sequence[float], most: int) -> Coarse:
    """Merge a graph's operators into at most so many groups.

    Args:
        graph: Graph of a step.
        seconds: Time of each operator [ops] [s].
        most: Largest number of groups.
    """
    merging = _Merging(graph, seconds)
    share = CHEAP_SHARE / most
    merging.merge_cheap(share)
    while merging.join_homes(share):
        merging.merge_cheap(share)
    while len(merging.members) > most:
        if not merging.merge_cheapest() and not merging.join_homes():
            merging.look_again()
    return merging.coarse()


class _Merging:
    """Groups while they merge; each has the number of one of its operators.

    Attributes:
        order: Groups in an order in which they can run; None where one has merged with another.
        place: Place of each group in that order.
        members: Operators of each group.
        seconds: Time of each group [s].
        after: Tensors that a group hands to each other group.
        before: Tensors that a group takes from each other group.
    """

    def __init__(self, graph: Graph, seconds: Sequence[float]) -> None:
        self.graph = graph
        group_of = _loops(graph)
        self.members: dict[int, list[int]] = {}
        for number, group in group_of.items():
            self.members.setdefault(group, []).append(number)
        self.order: list[int | None] = [*self.members]
        self.place = {group: at for at, group in enumerate(self.members)}
        self.seconds = {group: sum(seconds[op] for op in ops) for group, ops in self.members.items()}
        self.after: dict[int, dict[int, set[int]]] = {group: {} for group in self.members}
        self.before: dict[int, dict[int, set[int]]] = {group: {} for group in self.members}
        copied = copied_tensors(graph)
        for tensor, uses in enumerate(graph.uses):
            for use in uses if tensor not in copied else ():
                source, target = group_of[graph.maker[tensor][0]], group_of[use.op]
                if source != target and not use.is_back:
                    self.after[source].setdefault(target, set()).add(tensor)
                    self.before[target].setdefault(source, set()).add(tensor)
        # Home of each group, as in a forest of disjoint sets.
        self._home = {group: group for group in self.members}
        for state in _shared_states(graph):
            first, *others = (group_of[op] for op in state)
            for other in others:
                self._home[self.home(other)] = self.home(first)
        # Share of all time and of all memory of states that each home has.
        self.whole_s = sum(self.seconds.values())
        whole_bytes = sum(map(self._state_bytes, self.members))
        self.load: dict[int, float] = {}
        for group in self.members:
            own = self.seconds[group] / (self.whole_s or 1.0) + self._state_bytes(group) / (whole_bytes or 1.0)
            self.load[self.home(group)] = self.load.get(self.home(group), 0.0) + own
        # Groups that share their home with others; any other group may go where its neighbour is.
        self.bound: dict[int, set[int]] = {}
        for group in self.members:
            self.bound.setdefault(self.home(group), set()).add(group)
        self.bound = {home: groups for home, groups in self.bound.items() if len(groups) > 1}
        self._heap: list[tuple[float, int]] = []
        self._push(self.members)

    def home(self, group: int) -> int:
        """Return the home of a group."""
        while self._home[group] != group:
            self._home[group] = group = self._home[self._home[group]]
        return group

    def merge_cheap(self, share: float) -> None:
        """Merge the cheapest groups on the heap, those that take at most a share of all time."""
        least_s = share * self.whole_s
        while self._heap and self._heap[0][0] <= least_s:
            self._merge_next()

    def merge_cheapest(self) -> bool:
        """Merge the cheapest group on the heap that has a neighbour to merge with; return whether there is one."""
        while self._heap:
            if self._merge_next():
                return True
        return False

    def look_again(self) -> None:
        """Put all groups on the heap: what has merged may have freed the way to a neighbour."""
        self._push(self.members)

    def join_homes(self, most: float = math.inf) -> bool:
        """Join the home of the least load with the one with which it exchanges most bytes.

        Args:
            most: Largest load of the home.

        Returns:
            Whether a home has joined another.
        """
        able = [home for home in self.bound if self.load[home] <= most]
        homes = sorted(able, key=lambda home: (self.load[home], home))
        for home in homes:
            beside = self._homes_beside(home)
            if beside:
                self._join(home, min(beside, key=lambda other: (-beside[other], self.load[other], other)))
                self._push(self.bound[self.home(home)])
                return True
        if len(homes) > 1 and math.isinf(most):  # parts of the program that exchange nothing
            self._join(*homes[:2])
            self._push(self.bound[self.home(homes[0])])
            return True
        return False

    def _homes_beside(self, home: int) -> dict[int, float]:
        """Return the homes with which one exchanges data, with the bytes of each."""
        found: dict[int, float] = {}
        for group in self.bound[home]:
            for links in (self.before[group], self.after[group]):
                for other, tensors in links.items():
                    theirs = self.home(other)
                    if theirs != home and theirs in self.bound:
                        found[theirs] = found.get(theirs, 0.0) + self._num_bytes(tensors)
        return found

    def coarse(self) -> Coarse:
        """Return the groups."""
        number = {group: at for at, group in enumerate(group for group in self.order if group is not None)}
        homes: dict[int, list[int]] = {}
        for group, at in number.items():
            homes.setdefault(self.home(group), []).append(at)
        return Coarse(
            groups=tuple(tuple(sorted(self.members[group])) for group in number),
            homes=tuple(tuple(one) for one in homes.values() if len(one) > 1),
            cuts={
                (number[source], number[target]): tuple(sorted(tensors))
                for source in number
                for target, tensors in self.after[source].items()
            },
        )

    def _state_bytes(self, group: int) -> float:
        """Return the size of the states and inputs of a group [bytes]."""
        ops = (self.graph.ops[op] for op in self.members[group])
        return sum(self._num_bytes(op.results) for op in ops if op.begins)

    def _push(self, groups: Iterable[int]) -> None:
        for group in groups:
            heapq.heappush(self._heap, (self.seconds[group], group))

    def _merge_next(self) -> bool:
        """Take the cheapest group, and merge it with a neighbour if it may; return whether it does."""
        seconds, group = heapq.heappop(self._heap)
        if self.seconds.get(group) != seconds:
            return False  # has merged since
        for other in self._neighbours(group):
            first, second = sorted((group, other), key=self.place.__getitem__)
            between = self._between(first, second)
            if between is not None:
                self._merge(first, second, between)
                heapq.heappush(self._heap, (self.seconds[first], first))
                return True
        return False

    def _neighbours(self, group: int) -> Iterable[int]:
        """Return the groups that a group may merge with, those with which it exchanges most bytes first."""
        shared = {**self.before[group], **self.after[group]}
        found = {*shared, *self.bound.get(self.home(group), ())} - {group} or self._beside(group)
        may = [other for other in found if self._is_alike(group, other)]
        at = self.place[group]
        return sorted(may, key=lambda other: (-self._num_bytes(shared.get(other, ())), abs(self.place[other] - at)))

    def _beside(self, group: int) -> list[int]:
        """Return the groups next to one in the order, for one that exchanges nothing."""
        at = self.place[group]
        before = next((one for one in reversed(self.order[:at]) if one is not None), None)
        behind = next((one for one in self.order[at + 1 :] if one is not None), None)
        return [one for one in (before, behind) if one is not None]

    def _is_alike(self, group: int, other: int) -> bool:
        """Return whether merging two groups binds no further groups to each other."""
        is_one_home = self.home(group) == self.home(other)
        return is_one_home or not {self.home(group), self.home(other)} <= self.bound.keys()

    def _num_bytes(self, tensors: Iterable[int]) -> float:
        return sum(self.graph.tensors[tensor].num_bytes for tensor in tensors)

    def _between(self, first: int, second: int) -> list[int] | None:
        """Return the groups after one and before a later one that wait for it; None if the later one waits for them."""
        end, seen, stack = self.place[second], {first}, [first]
        while stack:
            group = stack.pop()
            for other in self.after[group]:
                if other == second:
                    if group != first:
                        return None
                elif self.place[other] < end and other not in seen:
                    seen.add(other)
                    stack.append(other)
        return sorted(seen - {first}, key=self.place.__getitem__)

    def _merge(self, first: int, second: int, between: list[int]) -> None:
        """Merge two groups into the first; what waits for it moves behind it in the order."""
        begin, end = self.place[first], self.place[second]
        waiting = set(between)
        others = [group for group in self.order[begin + 1 : end] if group is not None and group not in waiting]
        moved = [*others, first, *between]
        del self.place[second]
        self.place |= {group: begin + at for at, group in enumerate(moved)}
        self.order[begin : end + 1] = [*moved, *[None] * (end + 1 - begin - len(moved))]
        self.members[first] += self.members.pop(second)
        self.seconds[first] += self.seconds.pop(second)
        for links, back in ((self.after, self.before), (self.before, self.after)):
            for other, tensors in links.pop(second).items():
                del back[other][second]
                if other != first:
                    links[first].setdefault(other, set()).update(tensors)
                    back[other].setdefault(first, set()).update(tensors)
        for groups in (self.bound.get(self.home(first)), self.bound.get(self.home(second))):
            if groups is not None:
                groups.discard(second)
                groups.add(first)
        self._join(first, second)

    def _join(self, one: int, other: int) -> None:
        """Join the homes of two groups."""
        kept, left = self.home(one), self.home(other)
        if kept != left:
            self._home[left] = kept
            self.load[kept] += self.load.pop(left)
            if left in self.bound:
                self.bound[kept] = self.bound.get(kept, set()) | self.bound.pop(left)


def _loops(graph: Graph) -> dict[int, int]:
    """Return the first group of each operator but constants: its loop, or else itself.

    A loop is what stands between its start and the value that an iteration hands on, and what runs as often beside it.
    Whatever stands together in an order of the operators waits in no circle.
    """
    numbers = [number for number, op in enumerate(graph.ops) if op.primitive != CONSTANT]
    ends = {number: number for number in numbers}
    for tensor, uses in enumerate(graph.uses):
        for use in uses:
            if use.is_back and graph.ops[use.op].primitive != STATE:
                ends[use.op] = max(ends[use.op], graph.maker[tensor][0])
    found: dict[int, int] = {}
    first = end = -1
    before: int | None = None
    for number in numbers:
        repeats = before is not None and graph.ops[number].times > 1 and graph.ops[before].times > 1
        if number > end and not repeats:
            first = number
        end = max(end, ends[number])
        found[number] = first
        before = number
    return found


def copied_tensors(graph: Graph) -> frozenset[int]:
    """Return the tensors that every device computes for itself: constants, and what follows from small inputs alone."""
    found: set[int] = set()
    for op in graph.ops:
        is_small = all(graph.tensors[result].num_bytes <= COPIED_BYTES for result in op.results)
        if op.primitive == CONSTANT or (is_small and (op.begins or found.issuperset(op.operands))):
            found.update(op.results)
    return frozenset(found)


def _shared_states(graph: Graph) -> Iterable[list[int]]:
    """Yield the operators that read or write each state that no device computes for itself, its source first."""
    copied = copied_tensors(graph)
    for number, op in enumerate(graph.ops):
        if not op.begins or copied.issuperset(op.results):
            continue
        (tensor,) = op.results
        if op.primitive == STATE or graph.tensors[tensor].kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER):
            makers = [graph.maker[updated][0] for updated in op.operands]
            readers = [use.op for use in graph.uses[tensor]]
            yield [number, *(each for each in (*readers, *makers) if graph.ops[each].primitive != CONSTANT)]
