"""Optimal sharding of a graph as an integer program, solved by HiGHS independently of our heuristics.

The formulation is Alpa's (Zheng et al., OSDI 2022, section 4.2), extended to everything that
`costmodels.sharding.plan.cost_of` charges: the cost of a solution is the cost of its plan. Variables and constraints,
each with the method that makes it:

- x[o, c] is 1 if operator o takes choice c, which is a factor or none for every axis: one choice each (`_choices`).
- e[u, w, l, a] is 1 if the tensor of use u was written in layout w, lies in l once its partial sums are added up, and
  is read in a. For every use, the sum over w follows its maker's choices, the sum over a its reader's choices, and (w,
  l) is the same for all uses (`_flows`). Only x is integer; e follows from it.
- Partial sums go to a dim if all uses want it: pairs of l and a that contradict this are left out. They are added up
  everywhere only if the uses want different dims, or a dim that the axis can't cut evenly (`_sums`).
- y[t, l, a] is at least each e of a pass with l and a, so that a move for several uses is paid once (`_moves`). Where
  their operators run a different number of times, the first one pays: y is then per use, less the e of earlier uses.
- live[o] is the memory at operator o, and at most the limit (`_memory`). It holds every tensor with its partial sums
  and copies (`_hold`). Copies that had to be sent stay from their first to their last reader (`_stretches`).

A tensor is read in few layouts, so that e has thousands of entries per operator on three axes, and hundreds on two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.fusion import fused_on, lifetimes
from costmodels.sharding.graph import CONSTANT, STATE, Graph, Op
from costmodels.sharding.joining import latency_shares
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, local_share, moves
from costmodels.sharding.loop_sums import sums_under
from costmodels.sharding.plan import (
    NONE,
    MoveTimes,
    Plan,
    Roofline,
    can_cut,
    cost_of,
    reduce_partial_sums,
    wanted_layout,
    written_layout,
)
from tuner.planners.engine.mixed_integer import MixedInteger, Terms
from tuner.planners.engine.outcome import Limits, Outcome
from tuner.planners.sharding.table_forms import Row

Key = TypeVar("Key")

Allowed = Callable[[int], Sequence[Row] | None]
"""Choices that an operator is restricted to; None for no restriction."""

_COSTS = 1e3
"""Cost of a step on one device, in the program's unit.

HiGHS treats differences of 1e-6 as zero, so that costs must not be small numbers.
"""

_BYTES = 1e4
"""Limit of memory in the program's unit, chosen for the same reason."""


def shard_by_milp(
    graph: Graph,
    mesh: DeviceMesh,
    *,
    limits: Limits | None = None,
    memory_bytes: float | None = None,
    allowed: Allowed | None = None,
) -> Outcome[Plan]:
    """Find the plan of the least step time with HiGHS.

    Args:
        graph: Graph of the training step to shard.
        mesh: Mesh of devices to shard it over.
        limits: Limits of the search; nodes are those of HiGHS's own tree. None for no limits.
        memory_bytes: Most memory that a device may hold at a time; None for no limit.
        allowed: Restriction of the operators' choices; None for no restriction.
    """
    return _ShardingProgram(graph, mesh, memory_bytes, allowed or _everything).solve(limits or Limits())


def choices_of(op: Op, sizes: Sequence[int]) -> tuple[Row, ...]:
    """Enumerate everything that axes of these sizes can serve in an operator; an axis of one device serves nothing."""
    found: list[tuple[Row, tuple[int, ...]]] = [((), (1,) * len(op.rule.factors))]
    for size in sizes:
        found = [
            ((*choice, factor), _cut(ways, factor, size))
            for choice, ways in found
            for factor in (NONE, *(op.rule.cuttable if size > 1 else ()))
            if factor == NONE or op.rule.factors[factor].size % (ways[factor] * size) == 0
        ]
    return tuple(choice for choice, _ in found)


def _cut(ways: tuple[int, ...], factor: int, size: int) -> tuple[int, ...]:
    """Multiply the parts of a factor by the size of an axis that serves it."""
    return ways if factor == NONE else (*ways[:factor], ways[factor] * size, *ways[factor + 1 :])


def _everything(_: int) -> None:
    """Restrict no operator."""
    return


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """One possible layout of a tensor as written, and one after its partial sums are added up.

    Attributes:
        written: Layout of the tensor as its maker leaves it.
        lies: Layout once partial sums are added up.
        is_so: Linear expression that is 1 if the tensor has these layouts.
    """

    written: Layout
    lies: Layout
    is_so: Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """One possible way of a tensor from its maker to one of its uses.

    Attributes:
        written: Layout of the tensor as its maker leaves it.
        lies: Layout once partial sums are added up.
        wanted: Layout that the use asks for.
        var: Variable that is 1 if all three are so.
    """

    written: Layout
    lies: Layout
    wanted: Layout
    var: int


class _ShardingProgram:
    """Integer program of one graph on one mesh.

    Attributes:
        choices: Choices of each operator [o][c].
        x: Variables of these choices [o][c].
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, memory_bytes: float | None, allowed: Allowed) -> None:
        """Add all variables and constraints."""
        self.graph, self.mesh, self.memory_bytes = graph, mesh, memory_bytes
        self.program = MixedInteger()
        self.choices: list[tuple[Row, ...]] = []
        self.x: list[list[int]] = []
        self.move_s = MoveTimes(graph, mesh)
        self.shares = latency_shares(graph)
        self.lifetimes = lifetimes(fused_on(graph, mesh))
        self.changes: list[Terms] = [[] for _ in (*graph.ops, None)]
        self.unit_s = 1.0
        self._choices(allowed)
        for tensor in range(len(graph.tensors)):
            self._tensor(tensor)
        if memory_bytes is not None:
            self._memory(memory_bytes)

    def solve(self, limits: Limits) -> Outcome[Plan]:
        def read(values: np.ndarray) -> tuple[float, Plan]:
            rows = [
                choices[int(values[numbers].argmax())] for choices, numbers in zip(self.choices, self.x, strict=True)
            ]
            served = np.array(rows, dtype=np.int64).reshape(len(rows), len(self.mesh.sizes))
            plan = Plan(graph=self.graph, mesh=self.mesh, served=served)
            return cost_of(plan).step_time_s, plan

        return self.program.solve(limits, read, unit=self.unit_s)

    def _choices(self, allowed: Allowed) -> None:
        """Add one choice for each operator, with the cost of its compute."""
        roofline = Roofline(self.graph, self.mesh)
        nothing = (NONE,) * len(self.mesh.sizes)
        # Costs are scaled by the compute of one device, because HiGHS works with absolute tolerances.
        alone_s = sum(roofline.seconds(number, nothing) for number in range(len(self.graph.ops)))
        self.unit_s = alone_s / _COSTS or self.unit_s
        known: dict[tuple[object, ...], tuple[tuple[Row, ...], list[float]]] = {}
        for number, op in enumerate(self.graph.ops):
            key = (op.rule, op.is_free, op.flop, op.times, op.precision, roofline.traffic[number])
            if key not in known:
                found = choices_of(op, self.mesh.sizes)
                known[key] = found, [roofline.seconds(number, choice) for choice in found]
            choices, seconds = known[key]
            if (only := allowed(number)) is not None:
                choices, seconds = tuple(only), [roofline.seconds(number, choice) for choice in only]
            variables: list[int] = self.program.variables((len(choices),), upper=1.0, integer=True).tolist()
            self.program.add(((var, 1.0) for var in variables), at_least=1.0, at_most=1.0)
            self._charge(zip(variables, seconds, strict=True))
            self.choices.append(choices)
            self.x.append(variables)

    def _charge(self, terms: Iterable[tuple[int, float]]) -> None:
        self.program.cost((var, seconds / self.unit_s) for var, seconds in terms if seconds > 0)

    def _tensor(self, tensor: int) -> None:
        """Add the variables, moves and memory of a tensor."""
        maker, slot = self.graph.maker[tensor]
        uses = self.graph.uses[tensor]
        is_constant = self.graph.ops[maker].primitive == CONSTANT
        rule = self.graph.ops[maker].rule
        written = self._group_by_layout(maker, lambda choice: written_layout(rule, slot, choice))
        wanted = [
            self._group_by_layout(use.op, lambda choice, use=use: self._wanted(use.op, use.operand, choice))  # type: ignore[misc] # mypy sees no default
            for use in uses
        ]
        if is_constant and self.memory_bytes is None:
            return
        shape = self.graph.tensors[tensor].shape
        states, flows = self._flows(written, wanted, shape, is_constant=is_constant)
        if not is_constant:
            self._sums(states, wanted, shape)
            num_bytes, share = self.graph.tensors[tensor].num_bytes, self.shares[tensor]
            for state in states:
                # Adding up partial sums is the move from the written layout to where the tensor lies.
                times = sums_under(self.graph, self.mesh, tensor, state.written, state.lies)
                seconds = times * self.move_s[state.written, state.lies, num_bytes, share]
                self._charge((var, factor * seconds) for var, factor in state.is_so)
            self._moves(tensor, flows)
        if self.memory_bytes is not None:
            self._hold(tensor, states, flows)

    def _wanted(self, op: int, operand: int, choice: Row) -> Layout:
        return wanted_layout(self.graph.ops[op].rule, operand, choice)

    def _group_by_layout(self, op: int, layout_of: Callable[[Row], Layout]) -> dict[Layout, Terms]:
        """Group an operator's choices by the layout that they make; a group's expression is 1 for that layout."""
        found: dict[Layout, Terms] = {}
        for choice, var in zip(self.choices[op], self.x[op], strict=True):
            found.setdefault(layout_of(choice), []).append((var, 1.0))
        return found

    def _flows(
        self,
        written: dict[Layout, Terms],
        wanted: Sequence[dict[Layout, Terms]],
        shape: Sequence[int],
        *,
        is_constant: bool,
    ) -> tuple[list[_State], list[list[_Flow]]]:
        """Add the variables e of each use, and return them with the states that follow from them."""
        sizes = self.mesh.sizes
        if not wanted:
            return [
                _State(written=each, lies=reduce_partial_sums(each, [], shape, sizes), is_so=terms)
                for each, terms in written.items()
            ], []
        pairs = [(each, lies) for each in written for lies in _possible_layouts(each, wanted, shape, sizes)]
        flows: list[list[_Flow]] = []
        for targets in wanted:
            found = [
                (each, lies, target)
                for each, lies in pairs
                for target in targets
                if is_constant or _agree(each, lies, target, shape, sizes, is_alone=len(wanted) == 1)
            ]
            variables = self.program.variables((len(found),), upper=1.0).tolist()
            flows.append(
                [
                    _Flow(written=each, lies=lies, wanted=target, var=var)
                    for (each, lies, target), var in zip(found, variables, strict=True)
                ]
            )
            self._balance(_sum_by(flows[-1], lambda flow: flow.wanted), targets)
        # All uses see the tensor written and lying in the same layouts, so that the first use's flows stand for them.
        first = _sum_by(flows[0], lambda flow: (flow.written, flow.lies))
        self._balance(_sum_by(flows[0], lambda flow: flow.written), written)
        for others in flows[1:]:
            self._balance(_sum_by(others, lambda flow: (flow.written, flow.lies)), first)
        return [_State(written=each, lies=lies, is_so=terms) for (each, lies), terms in first.items()], flows

    def _balance(self, some: Mapping[Key, Terms], others: Mapping[Key, Terms]) -> None:
        """Require both expressions to be equal for every key; a missing expression is zero."""
        for key in dict.fromkeys((*some, *others)):
            # Keys that only one side has must be zero there.
            minus = [(var, -factor) for var, factor in others.get(key, [])]
            self.program.add([*some.get(key, []), *minus], at_least=0.0, at_most=0.0)

    def _sums(self, states: Sequence[_State], wanted: Sequence[dict[Layout, Terms]], shape: Sequence[int]) -> None:
        """Forbid that partial sums are added up everywhere while all uses want the same dim, and it can be cut evenly.

        With a single use, its flows already exclude that.
        """
        if len(wanted) < 2:
            return
        for axis in range(len(self.mesh.sizes)):
            everywhere = [
                state for state in states if state.written[axis] == PARTIAL and state.lies[axis] == REPLICATED
            ]
            for dim in _common(wanted, axis) if everywhere else ():
                for_no_reason = [
                    term
                    for state in everywhere
                    if _is_open(state.written, state.lies, axis, dim, shape, self.mesh.sizes)
                    for term in state.is_so
                ]
                # Uses that want another dim on this axis permit that the sums are added up everywhere.
                others = [
                    (var, -factor)
                    for targets in wanted
                    for target, terms in targets.items()
                    if target[axis] != dim
                    for var, factor in terms
                ]
                self.program.add([*for_no_reason, *others], at_most=0.0)

    def _moves(self, tensor: int, flows: Sequence[Sequence[_Flow]]) -> None:
        """Charge each move once for all its uses in a pass, as often as the first of them runs."""
        times = [use.times for use in self.graph.uses[tensor]]
        by_move: dict[tuple[Layout, Layout, bool], dict[int, Terms]] = {}
        for use, found in enumerate(flows):
            again = self._is_again(tensor, use)
            for flow in found:
                by_move.setdefault((flow.lies, flow.wanted, again), {}).setdefault(use, []).append((flow.var, 1.0))
        for (lies, target, _), readers in by_move.items():
            seconds = self.move_s[lies, target, self.graph.tensors[tensor].num_bytes, self.shares[tensor]]
            if seconds <= 0:
                continue
            often = {times[use] for use in readers}
            # All uses run equally often, so that any of them may pay.
            if len(often) == 1:
                self._charge(_scale(self._any(readers.values()), often.pop() * seconds))
                continue
            # The first use of a copy pays for it: a use pays unless an earlier use reads the same copy.
            before: Terms = []
            for use, terms in readers.items():
                first = self._at_least([[*terms, *_scale(before, -1.0)]])
                self._charge(_scale(first, times[use] * seconds))
                before += terms

    def _is_again(self, tensor: int, use: int) -> bool:
        """Return whether a use reads a state in the backward pass, for which the state is moved again."""
        turn, maker = self.graph.first_backward, self.graph.maker[tensor][0]
        is_state = self.graph.ops[maker].primitive == STATE
        return is_state and turn is not None and self.graph.uses[tensor][use].op >= turn

    def _any(self, several: Iterable[Terms]) -> Terms:
        """Return an expression that is 1 if one of these is, wherever that costs something."""
        found = [terms for terms in several if terms]
        return found[0] if len(found) == 1 else self._at_least(found)

    def _at_least(self, several: Sequence[Terms]) -> Terms:
        """Return the least expression that is at least each of these and zero, wherever that costs something."""
        if not several:
            return []
        (var,) = self.program.variables((1,), upper=1.0).tolist()
        for terms in several:
            self.program.add([(var, 1.0), *_scale(terms, -1.0)], at_least=0.0)
        return [(var, 1.0)]

    def _hold(self, tensor: int, states: Sequence[_State], flows: Sequence[Sequence[_Flow]]) -> None:
        """Add the memory that a device holds for a tensor, its partial sums and its copies."""
        maker, _ = self.graph.maker[tensor]
        num_bytes, sizes = self.graph.tensors[tensor].num_bytes, self.mesh.sizes
        lifetime = self.lifetimes[tensor]
        for state in states:
            held_bytes = num_bytes * local_share(state.lies, sizes)
            more_bytes = num_bytes * local_share(state.written, sizes) - held_bytes
            self._stays(maker, maker, _scale(state.is_so, more_bytes))
            if lifetime is not None:
                self._stays(lifetime.first, lifetime.last, _scale(state.is_so, held_bytes))
        for (target, _, is_free), readers in self._copies(tensor, flows).items():
            read = {op: self._any(several) for op, several in readers.items()}
            copy_bytes = num_bytes * local_share(target, sizes)
            for first, last, is_there in self._stretches(read, is_kept=not is_free):
                self._stays(first, last, _scale(is_there, copy_bytes))

    def _copies(
        self, tensor: int, flows: Sequence[Sequence[_Flow]]
    ) -> dict[tuple[Layout, bool, bool], dict[int, list[Terms]]]:
        """Collect possible copies by layout, pass, and whether they are free, with the operators that may read each."""
        is_constant = self.graph.ops[self.graph.maker[tensor][0]].primitive == CONSTANT
        num_bytes = self.graph.tensors[tensor].num_bytes
        found: dict[tuple[Layout, bool, bool], dict[int, list[Terms]]] = {}
        for use, alike in enumerate(flows):
            op = self.graph.uses[tensor][use].op
            if self.graph.uses[tensor][use].is_back:
                continue
            parts: dict[tuple[Layout, bool, bool], Terms] = {}
            for flow in alike:
                if flow.lies != flow.wanted:
                    # Slices and constants cost no message, and are not kept between readers.
                    is_free = is_constant or not moves(flow.lies, flow.wanted, num_bytes, self.mesh.sizes)
                    key = (flow.wanted, self._is_again(tensor, use), is_free)
                    parts.setdefault(key, []).append((flow.var, 1.0))
            for key, terms in parts.items():
                found.setdefault(key, {}).setdefault(op, []).append(terms)
        return found

    def _stretches(self, read: Mapping[int, Terms], *, is_kept: bool) -> Iterator[tuple[int, int, Terms]]:
        """Yield the ranges of operators during which a copy exists.

        A copy exists at each operator that reads it and, if it is kept, from the first reader to the last.
        """
        # A kept copy exists between two readers if an earlier operator reads it and a later one does, too.
        ops = list(read)
        before: list[Terms] = [[]]  # whether the copy was read before each operator, and at it or later
        later: list[Terms] = [[]]
        for op in ops if is_kept else ():
            before.append(self._any([before[-1], read[op]]))
        for op in reversed(ops) if is_kept else ():
            later.append(self._any([later[-1], read[op]]))
        later.reverse()
        for number, op in enumerate(ops):
            if not is_kept or len(ops) == 1:
                yield op, op, read[op]
                continue
            passes = self._both(before[number], later[number + 1])
            yield op, op, self._any([read[op], passes])
            if number + 1 < len(ops):
                yield op + 1, ops[number + 1] - 1, self._both(before[number + 1], later[number + 1])

    def _both(self, some: Terms, others: Terms) -> Terms:
        """Return an expression that is 1 if both of these are, wherever that costs something."""
        if not some or not others:
            return []
        (var,) = self.program.variables((1,), upper=1.0).tolist()
        # The variable is at least the sum of both less one: 1 if both are 1.
        self.program.add([(var, 1.0), *_scale(some, -1.0), *_scale(others, -1.0)], at_least=-1.0)
        return [(var, 1.0)]

    def _stays(self, first: int, last: int, held: Terms) -> None:
        """Hold bytes in memory from one operator to another."""
        if first <= last:
            self.changes[first] += held
            self.changes[last + 1] += _scale(held, -1.0)

    def _memory(self, memory_bytes: float) -> None:
        # The memory at an operator is that at the operator before, plus the change in between.
        live: list[int] = self.program.variables((len(self.graph.ops),), upper=_BYTES).tolist()
        for number, var in enumerate(live):
            before: Terms = [(live[number - 1], 1.0)] if number else []
            changes = _scale(self.changes[number], _BYTES / memory_bytes)
            self.program.add([(var, -1.0), *before, *changes], at_least=0.0, at_most=0.0)


def _possible_layouts(
    written: Layout, wanted: Sequence[dict[Layout, Terms]], shape: Sequence[int], sizes: Sequence[int]
) -> Iterator[Layout]:
    """Yield the layouts that partial sums may end in: each axis on a dim that every use may want, or on none."""
    ways = [(REPLICATED, *_common(wanted, axis)) if dim == PARTIAL else (dim,) for axis, dim in enumerate(written)]
    for lies in itertools.product(*ways):
        if all(
            old != PARTIAL or dim == REPLICATED or _is_open(written, lies, axis, dim, shape, sizes)
            for axis, (old, dim) in enumerate(zip(written, lies, strict=True))
        ):
            yield lies


def _is_open(written: Layout, lies: Layout, axis: int, dim: int, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether an axis with partial sums can cut a dim evenly once the axes before it have their dims."""
    # Later axes with partial sums take what is left.
    before = [
        new if other < axis or old != PARTIAL else REPLICATED
        for other, (old, new) in enumerate(zip(written, lies, strict=True))
    ]
    return can_cut(before, axis, dim, shape, sizes)


def _common(wanted: Sequence[dict[Layout, Terms]], axis: int) -> list[int]:
    """Return the dims that every use may want cut by an axis."""
    dims = set.intersection(*({target[axis] for target in targets} for targets in wanted))
    return sorted(dims - {REPLICATED})


def _agree(
    written: Layout, lies: Layout, wanted: Layout, shape: Sequence[int], sizes: Sequence[int], *, is_alone: bool
) -> bool:
    """Return whether partial sums can lie so while a use, possibly the only one, wants the tensor in another layout."""
    return all(
        old != PARTIAL
        or new == target
        or (new == REPLICATED and not (is_alone and _is_open(written, lies, axis, target, shape, sizes)))
        for axis, (old, new, target) in enumerate(zip(written, lies, wanted, strict=True))
    )


def _sum_by(flows: Sequence[_Flow], key: Callable[[_Flow], Key]) -> dict[Key, Terms]:
    """Add up the variables of all flows with the same key."""
    found: dict[Key, Terms] = {}
    for flow in flows:
        found.setdefault(key(flow), []).append((flow.var, 1.0))
    return found


def _scale(terms: Terms, by: float) -> Terms:
    return [(var, factor * by) for var, factor in terms]
