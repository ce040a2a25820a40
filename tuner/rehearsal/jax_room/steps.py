"""Steps of training, recognised among the calls of a program's compiled functions.

A step ends when a function that ran in it is called again, and nearly all that the program held and the function took
at its first call is gone: replaced by what the step made.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jax._src.interpreters import partial_eval

from tuner.rehearsal.jax_room.arrays import LIVING
from tuner.rehearsal.jax_room.target import Target

_KEPT = 0.3
"""Largest share of the bytes that a step may leave alone: sums of gradients replace up to two thirds themselves."""
_PATIENCE = 4
"""Calls of one function, on results of its own, after which a step has ended although its state is still held."""
_MANY = 64
"""Most results that are tried for one that depends on weights alone."""


class EnoughError(BaseException):
    """End of a program after its last step. No handler of the program takes it for a fault of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Argument or result of a call.

    Attributes:
        number: Number of the array without data; 0 for a value with data.
        num_bytes: Its bytes on the first device.
        size: Its elements on the first device.
        maker: Function of the program that returned it.
        is_float: Whether its elements are floating-point numbers.
        is_used: Whether the compiled function takes it.
    """

    number: int
    num_bytes: int
    size: int
    maker: str
    is_float: bool
    is_used: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Call of a compiled function of the program.

    Attributes:
        maker: Name and place of the function.
        jaxpr: JAX's description of it; None if the program compiled it ahead of time.
        arguments: Its arguments.
        results: Its results.
        compiled: JAX's compiled function.
    """

    maker: str
    jaxpr: Any
    arguments: tuple[Summary, ...]
    results: tuple[Summary, ...]
    compiled: Any


@dataclass(frozen=True, slots=True)
class Made:
    """Call of a step, with the bytes of the arrays that lie beside its arguments on the first device."""

    call: Call
    beside_bytes: int


@dataclass(frozen=True, slots=True)
class _Opened:
    """First call of a function in a step: its place, and the bytes of what the program held, and of what it took."""

    place: int
    living: dict[int, int]
    taken: dict[int, int]


@dataclass(slots=True)
class Steps:
    """Record of a program's steps.

    Attributes:
        target: Devices of the program.
        wanted: Number of steps after which the program ends.
        ended: Steps that ended, with the CPU time of each [s].
        last: Calls of the last step that ended.
        calls: Calls since the present step began.
    """

    target: Target
    wanted: int
    ended: list[float] = field(default_factory=list)
    last: tuple[Made, ...] = ()
    calls: list[Made] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)
    _opened: dict[str, _Opened] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _began_s: float = 0.0

    def record(self, call: Call) -> None:
        """Record a call that is about to return.

        Raises:
            EnoughError: it begins one step more than wanted.
        """
        device = self.target.devices[0]
        results = {one.number for one in call.results}
        living = {number: size for number, size in LIVING.sizes(device).items() if number not in results}
        taken = {one.number for one in call.arguments if one.is_used and one.number in living}
        self._counts[call.maker] += 1
        opened = self._opened.get(call.maker)
        if opened is not None and self._ends_step(call, opened, living):
            self.ended.append(time.process_time() - self._began_s)
            self.last, self.calls = tuple(self.calls[opened.place :]), []
            self._opened.clear()
            self._counts.clear()
            self._began_s = time.process_time()
            if len(self.ended) == self.wanted:
                raise EnoughError
        held = {number: living[number] for number in taken}
        self._opened.setdefault(call.maker, _Opened(len(self.calls), living, held))
        beside = sum(size for number, size in living.items() if number not in taken)
        self.calls.append(Made(call, beside))
        self._held = living

    def _ends_step(self, call: Call, opened: _Opened, living: dict[int, int]) -> bool:
        if _left(opened.living, living) <= _KEPT and _left(opened.taken, living) <= _KEPT:
            return True
        own = sum(one.num_bytes for one in call.arguments if one.maker == call.maker)
        is_own = 2 * own >= sum(one.num_bytes for one in call.arguments) > 0
        return is_own and self._counts[call.maker] > _PATIENCE

    def step(self) -> tuple[Made, ...]:
        """Return the calls of the last step: of the present one if none has ended, and it takes most of the state."""
        if self.last:
            return self.last
        whole = sum(self._held.values())
        taken = sum(one.num_bytes for made in self.calls for one in made.call.arguments if one.maker)
        return tuple(self.calls) if self.calls and 2 * taken >= whole > 0 else ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a call on each device, by purpose.

    Attributes:
        peak: All bytes at the peak of the call, with what lies beside its arguments.
        parts: Bytes by purpose.
        parameters: Elements of the weights.
    """

    peak: int
    parts: dict[str, int]
    parameters: int


def memory_of(made: Made) -> Memory:
    """Return what a call needs by XLA's memory analysis: arguments, temporaries, results in places of their own."""
    call, found = made.call, made.call.compiled.xla_executable.get_compiled_memory_stats()
    fresh = found.output_size_in_bytes - found.alias_size_in_bytes
    weights = _weights(call)
    chosen = [one for position, one in enumerate(call.arguments) if position in weights and one.is_used]
    state = [
        one
        for position, one in enumerate(call.arguments)
        if one.is_used and position not in weights and one.is_float and one.maker == call.maker
    ]
    weight_bytes, optimizer_bytes = (sum(one.num_bytes for one in those) for those in (chosen, state))
    peak = made.beside_bytes + found.argument_size_in_bytes + found.temp_size_in_bytes + fresh
    parts = {"weights": weight_bytes, "optimizer": optimizer_bytes, "activations": found.temp_size_in_bytes}
    parts["other"] = peak - sum(parts.values())
    return Memory(peak=peak, parts=parts, parameters=sum(one.size for one in chosen))


def _weights(call: Call) -> frozenset[int]:
    """Return the positions of the arguments that are weights: those of the state that a loss depends on.

    A loss is a small result. Of several, that one counts that depends on least: norms of updates depend on the states
    of the optimizer too. Without one, weights are what every large result depends on.
    """
    if call.jaxpr is None:
        return frozenset()
    jaxpr = call.jaxpr.jaxpr
    state = frozenset(
        position for position, one in enumerate(call.arguments) if one.is_float and one.maker and one.num_bytes > 0
    )
    is_state = [one.num_bytes > 8 for one in call.results]
    small = [number for number, big in enumerate(is_state) if not big and call.results[number].is_float][:_MANY]
    found = [needed & state for needed in (_needed(jaxpr, number) for number in small)]
    if usable := [one for one in found if sum(call.arguments[position].num_bytes for position in one) > 8]:
        return min(usable, key=len)
    large = [number for number, big in enumerate(is_state) if big and call.results[number].is_float][:_MANY]
    needed = [_needed(jaxpr, number) & state for number in large]
    return frozenset.intersection(*needed) if needed else frozenset()


def _needed(jaxpr: Any, result: int) -> frozenset[int]:
    """Return the positions of the arguments that a result depends on."""
    wanted = [number == result for number in range(len(jaxpr.outvars))]
    _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
    return frozenset(position for position, is_used in enumerate(used) if is_used)


def _left(before: dict[int, int], living: dict[int, int]) -> float:
    """Return the share of the bytes that are still there; 1 if there were none."""
    whole = sum(before.values())
    return sum(size for number, size in before.items() if number in living) / whole if whole else 1.0
