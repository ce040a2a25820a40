"""Program of one device of a partitioned step, from the text of XLA's partitioner: its collectives, and all the rest.

XLA gives every device of a mesh the same program, on local shapes, with collectives in it. `alone` takes them out, so
that one device can run its share of the step by itself, and `collectives_s` gives their time on a cluster's links.

Each collective leaves something of its result's shape, behind a barrier that XLA does not optimise across: the operand
itself, where sums, exchanges and permutations have its shape; the device's own part, repeated, for a gather; the first
part, for a scatter. The device takes the place of the first one. So the numbers are wrong, and the work is not: a
device writes what it would receive, and computes all that it would compute.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.operators.kernels import collective_alone_s
from costmodels.xla.groups import Groups, groups_of
from costmodels.xla.program import Instruction, called_by, computations_of, loop_of
from hardware.cluster import Cluster

KINDS = {
    "all-reduce": OpKind.ALL_REDUCE,
    "reduce-scatter": OpKind.REDUCE_SCATTER,
    "all-gather": OpKind.ALL_GATHER,
    "all-to-all": OpKind.ALL_TO_ALL,
    "collective-permute": OpKind.SEND_RECV,
}
"""Kind of each collective of XLA's that sharding constraints lead to."""

_TYPE_BYTES = {"pred": 1.0, "bf16": 2.0}
_LINE = re.compile(r"^(\s+(?:ROOT )?)%(\S+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(")
_OTHERS = re.compile(r"^(all-|reduce-scatter|collective-|ragged-|send|recv|replica-id)")


@dataclass(frozen=True, kw_only=True, slots=True)
class XlaCollective:
    """One collective of a device's program.

    Attributes:
        kind: Kind of collective.
        message_bytes: Size of its message, as hardware/collectives.py defines it for the kind [bytes].
        groups: Numbers of the devices of each group; for a permutation, pairs of sender and receiver.
        times: Number of times that it runs in a step: more than once inside loops.
    """

    kind: OpKind
    message_bytes: float
    groups: Groups
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProgram:
    """Program of one device of a step.

    Attributes:
        alone: Text of the program without collectives, for one device.
        collectives: Its collectives, in the order of the text.
    """

    alone: str
    collectives: tuple[XlaCollective, ...]

    @classmethod
    def of(cls, text: str) -> DeviceProgram:
        """Return the program of a device from the text of a partitioned module.

        Raises:
            ValueError: The text has a collective that is none of KINDS, or one in a branch, or in a loop whose length
                is unknown.
        """
        lines: list[str] = []
        collectives = []
        times_of = _times_of(text)
        times: int | None = None
        for line in text.splitlines():
            if line.startswith("HloModule"):
                lines.append(re.sub(r", num_partitions=\d+", "", line))
                continue
            if name := _name_of(line):
                times = times_of.get(name)
            found = _LINE.match(line)
            if found is None or not (found[4] == "partition-id" or _OTHERS.match(found[4])):
                lines.append(line)
                continue
            if found[4] == "partition-id":
                lines.append(f"{found[1]}%{found[2]} = {found[3]} constant(0)")
                continue
            if found[4] not in KINDS or times is None:
                raise ValueError(f"can't tell the time of {line.strip()[:200]}")
            one = replace(_collective(line, found[4], found[3]), times=times)
            collectives.append(one)
            lines += _stand_ins(line, found, len(one.groups[0]))
        return cls(alone="\n".join(lines), collectives=tuple(collectives))

    def collectives_s(self, cluster: Cluster) -> float:
        """Return the time of all collectives, one after the other, on the links of a cluster [s]."""
        known: dict[XlaCollective, float] = {}
        for one in self.collectives:
            if one not in known:
                known[one] = _seconds(one, cluster)
        return sum(known[one] * one.times for one in self.collectives)


def _name_of(line: str) -> str | None:
    """Return the name of the computation that begins at a line of a module; None at any other line."""
    found = _COMPUTATION.match(line)
    return found[1] if found else None


def _times_of(text: str) -> dict[str, int]:
    """Return how often each computation runs in a step.

    The entry runs once, bodies of loops as often as these turn, and called computations, such as the body of a
    `jax.shard_map`, as often as all their callers together. Branches and loops of unknown length are left out, with all
    that they call.
    """
    entry, parts = computations_of(text)
    found: dict[str, int | None] = {}
    waiting: list[tuple[str, int | None]] = [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        if found.get(name, 0) is None:
            continue  # some of its callers cannot be counted
        found[name] = None if times is None else times + (found.get(name) or 0)
        for each in parts.get(name, ()):
            for inner, turns in _run_by(each, parts):
                waiting.append((inner, None if times is None or turns is None else times * turns))
    return {name: times for name, times in found.items() if times is not None}


def _run_by(instruction: Instruction, parts: Mapping[str, list[Instruction]]) -> Iterator[tuple[str, int | None]]:
    """Yield the computations that an instruction runs, and how often; None where that is not known."""
    if instruction.opcode == "while":
        with contextlib.suppress(ValueError):
            yield loop_of(instruction, parts)
            return
    if instruction.opcode in ("while", "call", "conditional"):
        times = 1 if instruction.opcode == "call" else None
        yield from ((name, times) for name in called_by(instruction))


def _collective(line: str, opcode: str, types: str) -> XlaCollective:
    """Return the collective of a line, whose result has these types."""
    kind, num_bytes = KINDS[opcode], _num_bytes(types)
    if kind == OpKind.SEND_RECV:
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        numbers = [int(number) for number in re.findall(r"\d+", pairs[1])] if pairs else []
        # a part that stays on its device is no message
        moved = tuple(pair for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[0] != pair[1])
        return XlaCollective(kind=kind, message_bytes=num_bytes, groups=moved or ((0,),))
    groups = groups_of(line)
    if kind == OpKind.REDUCE_SCATTER:
        num_bytes *= len(groups[0])
    return XlaCollective(kind=kind, message_bytes=num_bytes, groups=groups)


def _stand_ins(line: str, found: re.Match[str], group: int) -> Iterator[str]:
    """Yield what takes a collective's place in a program of one device."""
    head, name, types, opcode, operands = found.groups()
    if types.startswith("("):
        yield f"  %{name}.alone = {types} tuple({operands})"
    elif opcode == "all-gather":
        dim = re.search(r"dimensions=\{(\d+)\}", line)
        assert dim is not None, "a gather has a dim"
        yield f"  %{name}.alone = {types} concatenate({', '.join([operands] * group)}), dimensions={{{dim[1]}}}"
    elif opcode == "reduce-scatter":
        parts = ", ".join(f"[0:{size}]" for size in re.findall(r"\d+", types[types.index("[") : types.index("]")]))
        yield f"  %{name}.alone = {types} slice({operands}), slice={{{parts}}}"
    else:
        yield f"{head}%{name} = {types} opt-barrier({operands})"
        return
    yield f"{head}%{name} = {types} opt-barrier(%{name}.alone)"


def _seconds(one: XlaCollective, cluster: Cluster) -> float:
    """Return the time of a collective, while all of its groups communicate [s]."""
    groups = np.array(one.groups, dtype=np.int64)
    links = cluster.links_among([groups], np.unique(groups))
    return float(collective_alone_s(one.kind, np.array([one.message_bytes]), links).max())


def _num_bytes(types: str) -> float:
    """Return the size of an array, or of all arrays of a tuple [bytes].

    Raises:
        ValueError: The size of a type is unknown.
    """
    total = 0.0
    for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types):
        bits = re.search(r"^[fsu](\d+)", dtype)
        element_bytes = _TYPE_BYTES.get(dtype) or (int(bits[1]) / 8 if bits else None)
        if element_bytes is None:
            raise ValueError(f"can't tell the size of {dtype}")
        total += element_bytes * math.prod(int(size) for size in dims.split(",") if size)
    return total
