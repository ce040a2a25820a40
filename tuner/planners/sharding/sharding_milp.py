"""The best sharding of a graph as an integer program, solved by HiGHS: an optimum that owes nothing to our heuristics.

The formulation is Alpa's (Zheng et al., OSDI 2022, section 4.2), extended to all that
`costmodels.sharding.plan.cost_of`
charges: the cost of a solution is that of its plan. Variables and constraints, each beside the method that makes it:

- x[o, c] is 1 if operator o takes choice c, which is a factor or none for every axis: one each (`_choices`).
- e[u, w, l, a] is 1 if what use u reads was written in layout w, lies in l once its partial sums are added up, and is
  read in a: for every use as much of w as its maker's choices leave, as much of a as its reader's want, and (w, l) is
  the same for all uses (`_flows`). Only x is whole by demand; e follows.
- Partial sums go to a dim if all uses want it, which is what pairs of l and a are left out for, and everywhere only if
  they want different ones (`_sums`).
- y[t, l, a] is at least each e of a pass with l and a, so that a move for several uses is paid once (`_moves`). Where
  their operators run differently often, the first pays: y is per use, and less by the e of the uses before.
- live[o] is what lies in memory at operator o, at most the limit (`_memory`): every tensor, with its partial sums and
  copies (`_hold`), of which those that had to be sent stay from the first to the last who reads them (`_stretches`).

A tensor is read in few layouts, so that e has thousands of entries per operator on three axes, and hundreds on two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CONSTANT, STATE, Graph, Op
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, local_share, moves
from costmodels.sharding.plan import NONE, Plan, Roofline, cost_of, lifetimes, settled, wanted_layout, written_layout
from tuner.planners.engine.mixed_integer import MixedInteger, Terms
from tuner.planners.engine.outcome import Limits, Outcome

Key = TypeVar("Key")

Choice = tuple[int, ...]
"""Of each axis the factor that it serves, or NONE."""

Allowed = Callable[[int], Sequence[Choice] | None]
"""The only choices that an operator may take; None for all."""

_COSTS = 1e3
"""What HiGHS sees the step cost on one device: it takes 1e-6 for nothing."""

_BYTES = 1e4
"""What it sees the limit of memory as, for the same reason."""


def shard_by_milp(
    graph: Graph,
    mesh: DeviceMesh,
    *,
    limits: Limits | None = None,
    memory_bytes: float | None = None,
    allowed: Allowed | None = None,
) -> Outcome[Plan]:
    """The plan of the least step time, by HiGHS.

    Args:
        graph: What to shard.
        mesh: Over what.
        limits: When to stop; nodes are those of HiGHS's own tree.
        memory_bytes: The most that a device may hold at a time; None for anything.
        allowed: Restricts operators.
    """
    return _ShardingProgram(graph, mesh, memory_bytes, allowed or _everything).solve(limits or Limits())


def choices_of(op: Op, sizes: Sequence[int]) -> tuple[Choice, ...]:
    """All that axes of these sizes can serve in an operator; an axis of one device serves nothing."""
    found: list[tuple[Choice, tuple[int, ...]]] = [((), (1,) * len(op.rule.factors))]
    for size in sizes:
        found = [
            ((*choice, factor), _cut(ways, factor, size))
            for choice, ways in found
            for factor in (NONE, *(op.rule.cuttable if size > 1 else ()))
            if factor == NONE or op.rule.factors[factor].size % (ways[factor] * size) == 0
        ]
    return tuple(choice for choice, _ in found)


def _cut(ways: tuple[int, ...], factor: int, size: int) -> tuple[int, ...]:
    return ways if factor == NONE else (*ways[:factor], ways[factor] * size, *ways[factor + 1 :])


def _everything(_: int) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """How a tensor may be written and lie.

    Attributes:
        written: The former.
        lies: The latter.
        is_so: A linear expression that is 1 if it does.
    """

    written: Layout
    lies: Layout
    is_so: Terms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flow:
    """How one use may read a tensor.

    Attributes:
        written: How the tensor was written.
        lies: How it lies.
        wanted: How it is read.
        var: The variable that is 1 if so.
    """

    written: Layout
    lies: Layout
    wanted: Layout
    var: int


class _ShardingProgram:
    """The program of one graph on one mesh.

    Attributes:
        choices: Of each operator [o][c].
        x: Their variables [o][c].
    """

    def __init__(self, graph: Graph, mesh: DeviceMesh, memory_bytes: float | None, allowed: Allowed) -> None:
        self.graph, self.mesh, self.memory_bytes = graph, mesh, memory_bytes
        self.program = MixedInteger()
        self.choices: list[tuple[Choice, ...]] = []
        self.x: list[list[int]] = []
        self.seconds: dict[tuple[Layout, Layout, float], float] = {}
        self.lifetimes = lifetimes(graph)
        self.changes: list[Terms] = [[] for _ in (*graph.ops, None)]
        self.unit_s = 1.0
        self._choices(allowed)
        for tensor in range(len(graph.tensors)):
            self._tensor(tensor)
        if memory_bytes is not None:
            self._memory(memory_bytes)

    def solve(self, limits: Limits) -> Outcome[Plan]:
        """The plan that the variables tell."""

        def read(values: np.ndarray) -> tuple[float, Plan]:
            rows = [
                choices[int(values[numbers].argmax())] for choices, numbers in zip(self.choices, self.x, strict=True)
            ]
            served = np.array(rows, dtype=np.int64).reshape(len(rows), len(self.mesh.sizes))
            plan = Plan(graph=self.graph, mesh=self.mesh, served=served)
            return cost_of(plan).step_time_s, plan

        return self.program.solve(limits, read, unit=self.unit_s)

    def _choices(self, allowed: Allowed) -> None:
        """One choice for each operator, and its compute."""
        roofline = Roofline(self.graph, self.mesh)
        nothing = (NONE,) * len(self.mesh.sizes)
        alone_s = sum(roofline.seconds(number, nothing) for number in range(len(self.graph.ops)))
        self.unit_s = alone_s / _COSTS or self.unit_s
        known: dict[tuple[object, ...], tuple[tuple[Choice, ...], list[float]]] = {}
        for number, op in enumerate(self.graph.ops):
            num_bytes = [self.graph.tensors[tensor].num_bytes for tensor in (*op.operands, *op.results)]
            key = (op.rule, op.is_free, op.flop, op.times, op.precision, *num_bytes)
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
        """Adds seconds to what is minimised."""
        self.program.cost((var, seconds / self.unit_s) for var, seconds in terms if seconds > 0)

    def _tensor(self, tensor: int) -> None:
        """All that happens to a tensor."""
        maker, slot = self.graph.maker[tensor]
        uses = self.graph.uses[tensor]
        is_constant = self.graph.ops[maker].primitive == CONSTANT
        rule = self.graph.ops[maker].rule
        written = self._grouped(maker, lambda choice: written_layout(rule, slot, choice))
        wanted = [
            self._grouped(use.op, lambda choice, use=use: self._wanted(use.op, use.operand, choice))  # type: ignore[misc] # mypy sees no default
            for use in uses
        ]
        if is_constant and self.memory_bytes is None:
            return
        states, flows = self._flows(written, wanted, is_constant=is_constant)
        if not is_constant:
            self._sums(states, wanted)
            times = self.graph.sums[tensor]
            for state in states:
                seconds = times * self._move_s(tensor, state.written, state.lies)
                self._charge((var, factor * seconds) for var, factor in state.is_so)
            self._moves(tensor, flows)
        if self.memory_bytes is not None:
            self._hold(tensor, states, flows)

    def _wanted(self, op: int, operand: int, choice: Choice) -> Layout:
        return wanted_layout(self.graph.ops[op].rule, operand, choice)

    def _grouped(self, op: int, layout_of: Callable[[Choice], Layout]) -> dict[Layout, Terms]:
        """The layouts that an operator's choices make, each with the expression that is 1 for it."""
        found: dict[Layout, Terms] = {}
        for choice, var in zip(self.choices[op], self.x[op], strict=True):
            found.setdefault(layout_of(choice), []).append((var, 1.0))
        return found

    def _move_s(self, tensor: int, before: Layout, after: Layout) -> float:
        """What it takes to move a tensor [s]."""
        num_bytes = self.graph.tensors[tensor].num_bytes
        key = (before, after, num_bytes)
        if key not in self.seconds:
            changes = moves(before, after, num_bytes, self.mesh.sizes)
            self.seconds[key] = sum(move.seconds(self.mesh) for move in changes)
        return self.seconds[key]

    def _flows(
        self, written: dict[Layout, Terms], wanted: Sequence[dict[Layout, Terms]], *, is_constant: bool
    ) -> tuple[list[_State], list[list[_Flow]]]:
        """The variables e, by use, and the states that follow from them."""
        if not wanted:
            return [_State(written=each, lies=settled(each, []), is_so=terms) for each, terms in written.items()], []
        pairs = [(each, lies) for each in written for lies in _lying(each, wanted)]
        flows: list[list[_Flow]] = []
        for targets in wanted:
            found = [
                (each, lies, target)
                for each, lies in pairs
                for target in targets
                if is_constant or _agree(each, lies, target, is_alone=len(wanted) == 1)
            ]
            variables = self.program.variables((len(found),), upper=1.0).tolist()
            flows.append(
                [
                    _Flow(written=each, lies=lies, wanted=target, var=var)
                    for (each, lies, target), var in zip(found, variables, strict=True)
                ]
            )
            self._balance(_summed(flows[-1], lambda flow: flow.wanted), targets)
        first = _summed(flows[0], lambda flow: (flow.written, flow.lies))
        self._balance(_summed(flows[0], lambda flow: flow.written), written)
        for others in flows[1:]:
            self._balance(_summed(others, lambda flow: (flow.written, flow.lies)), first)
        return [_State(written=each, lies=lies, is_so=terms) for (each, lies), terms in first.items()], flows

    def _balance(self, some: Mapping[Key, Terms], others: Mapping[Key, Terms]) -> None:
        """Both expressions are equal for every key; where there is none it is zero."""
        for key in dict.fromkeys((*some, *others)):
            minus = [(var, -factor) for var, factor in others.get(key, [])]
            self.program.add([*some.get(key, []), *minus], at_least=0.0, at_most=0.0)

    def _sums(self, states: Sequence[_State], wanted: Sequence[dict[Layout, Terms]]) -> None:
        """Partial sums go everywhere only where not all uses want the same dim; of one use its flows say that."""
        if len(wanted) < 2:
            return
        for axis in range(len(self.mesh.sizes)):
            everywhere = [
                term
                for state in states
                if state.written[axis] == PARTIAL and state.lies[axis] == REPLICATED
                for term in state.is_so
            ]
            if not everywhere:
                continue
            for dim in _common(wanted, axis):
                others = [
                    (var, -factor)
                    for targets in wanted
                    for target, terms in targets.items()
                    if target[axis] != dim
                    for var, factor in terms
                ]
                self.program.add([*everywhere, *others], at_most=0.0)

    def _moves(self, tensor: int, flows: Sequence[Sequence[_Flow]]) -> None:
        """What moves for one use or for several of a pass is paid once, as often as the first of them runs."""
        times = [use.times for use in self.graph.uses[tensor]]
        by_move: dict[tuple[Layout, Layout, bool], dict[int, Terms]] = {}
        for use, found in enumerate(flows):
            again = self._is_again(tensor, use)
            for flow in found:
                by_move.setdefault((flow.lies, flow.wanted, again), {}).setdefault(use, []).append((flow.var, 1.0))
        for (lies, target, _), readers in by_move.items():
            seconds = self._move_s(tensor, lies, target)
            if seconds <= 0:
                continue
            often = {times[use] for use in readers}
            if len(often) == 1:
                self._charge(_scaled(self._any(readers.values()), often.pop() * seconds))
                continue
            before: Terms = []
            for use, terms in readers.items():
                first = self._at_least([[*terms, *_scaled(before, -1.0)]])
                self._charge(_scaled(first, times[use] * seconds))
                before += terms

    def _is_again(self, tensor: int, use: int) -> bool:
        """Whether a use reads a state in the backward pass, for which that is moved again."""
        turn, maker = self.graph.first_backward, self.graph.maker[tensor][0]
        is_state = self.graph.ops[maker].primitive == STATE
        return is_state and turn is not None and self.graph.uses[tensor][use].op >= turn

    def _any(self, several: Iterable[Terms]) -> Terms:
        """1 if one of these expressions is, where that costs something."""
        found = [terms for terms in several if terms]
        return found[0] if len(found) == 1 else self._at_least(found)

    def _at_least(self, several: Sequence[Terms]) -> Terms:
        """The least that is no less than any of these expressions and than zero, where that costs something."""
        if not several:
            return []
        (var,) = self.program.variables((1,), upper=1.0).tolist()
        for terms in several:
            self.program.add([(var, 1.0), *_scaled(terms, -1.0)], at_least=0.0)
        return [(var, 1.0)]

    def _hold(self, tensor: int, states: Sequence[_State], flows: Sequence[Sequence[_Flow]]) -> None:
        """What a device holds of a tensor, of its partial sums, and of its copies."""
        maker, _ = self.graph.maker[tensor]
        num_bytes, sizes = self.graph.tensors[tensor].num_bytes, self.mesh.sizes
        lifetime = self.lifetimes[tensor]
        for state in states:
            held_bytes = num_bytes * local_share(state.lies, sizes)
            more_bytes = num_bytes * local_share(state.written, sizes) - held_bytes
            self._stays(maker, maker, _scaled(state.is_so, more_bytes))
            if lifetime is not None:
                self._stays(lifetime.first, lifetime.last, _scaled(state.is_so, held_bytes))
        for (target, _, is_free), readers in self._copies(tensor, flows).items():
            read = {op: self._any(several) for op, several in readers.items()}
            copy_bytes = num_bytes * local_share(target, sizes)
            for first, last, is_there in self._stretches(read, is_kept=not is_free):
                self._stays(first, last, _scaled(is_there, copy_bytes))

    def _copies(
        self, tensor: int, flows: Sequence[Sequence[_Flow]]
    ) -> dict[tuple[Layout, bool, bool], dict[int, list[Terms]]]:
        """By layout, pass, and whether it costs nothing: each operator that may read such a copy, use by use."""
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
                    is_free = is_constant or not moves(flow.lies, flow.wanted, num_bytes, self.mesh.sizes)
                    key = (flow.wanted, self._is_again(tensor, use), is_free)
                    parts.setdefault(key, []).append((flow.var, 1.0))
            for key, terms in parts.items():
                found.setdefault(key, {}).setdefault(op, []).append(terms)
        return found

    def _stretches(self, read: Mapping[int, Terms], *, is_kept: bool) -> Iterator[tuple[int, int, Terms]]:
        """While which operators a copy is there: at each that reads it, and between the first and the last if kept."""
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
        """1 if both expressions are, where that costs something."""
        if not some or not others:
            return []
        (var,) = self.program.variables((1,), upper=1.0).tolist()
        self.program.add([(var, 1.0), *_scaled(some, -1.0), *_scaled(others, -1.0)], at_least=-1.0)
        return [(var, 1.0)]

    def _stays(self, first: int, last: int, held: Terms) -> None:
        """Bytes that are in memory from one operator to another."""
        if first <= last:
            self.changes[first] += held
            self.changes[last + 1] += _scaled(held, -1.0)

    def _memory(self, memory_bytes: float) -> None:
        """The limit at each operator."""
        live: list[int] = self.program.variables((len(self.graph.ops),), upper=_BYTES).tolist()
        for number, var in enumerate(live):
            before: Terms = [(live[number - 1], 1.0)] if number else []
            changes = _scaled(self.changes[number], _BYTES / memory_bytes)
            self.program.add([(var, -1.0), *before, *changes], at_least=0.0, at_most=0.0)


def _lying(written: Layout, wanted: Sequence[dict[Layout, Terms]]) -> Iterator[Layout]:
    """Where a tensor may lie once its partial sums are added up: on a dim that every use may want, or everywhere."""
    ways = [(REPLICATED, *_common(wanted, axis)) if dim == PARTIAL else (dim,) for axis, dim in enumerate(written)]
    return itertools.product(*ways)


def _common(wanted: Sequence[dict[Layout, Terms]], axis: int) -> list[int]:
    """The dims that every use may want cut by an axis."""
    dims = set.intersection(*({target[axis] for target in targets} for targets in wanted))
    return sorted(dims - {REPLICATED})


def _agree(written: Layout, lies: Layout, wanted: Layout, *, is_alone: bool) -> bool:
    """Whether partial sums can lie so while a use, which may be the only one, wants the tensor like that."""
    return all(
        old != PARTIAL or new == target or (new == REPLICATED and not is_alone)
        for old, new, target in zip(written, lies, wanted, strict=True)
    )


def _summed(flows: Sequence[_Flow], key: Callable[[_Flow], Key]) -> dict[Key, Terms]:
    """All flows of one key together."""
    found: dict[Key, Terms] = {}
    for flow in flows:
        found.setdefault(key(flow), []).append((flow.var, 1.0))
    return found


def _scaled(terms: Terms, by: float) -> Terms:
    return [(var, factor * by) for var, factor in terms]
