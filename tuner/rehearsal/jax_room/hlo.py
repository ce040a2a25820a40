"""Read the program that XLA compiled for each device: its operators, and its collectives with bytes and ranks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from costmodels.xla.groups import groups_of

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = frozenset(("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional"))
"""Instructions that run no kernel of their own."""
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.\-]+))")
_RUNS = ("while", "call", "conditional", "async-start")
"""Instructions whose called computations run as a sequence of kernels; others call them inside one kernel."""
_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"^(?:[fsuc]|bf)(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction of a computation: its name, the text of its type, its opcode, and the rest of its line."""

    name: str
    types: str
    opcode: str
    rest: str


@dataclass(frozen=True, slots=True)
class Collective:
    """Kind of collective of a rank: opcode, bytes of its largest side on a device, ranks of its group, and peer.

    The peer is the rank to which a permutation sends; -1 for other collectives, and where it sends nowhere.
    """

    name: str
    size: int
    ranks: tuple[int, ...]
    peer: int = -1


@dataclass(frozen=True, slots=True)
class Program:
    """What every device runs in a call.

    Attributes:
        operators: Number of runs of each opcode.
        collectives: Instructions of collectives with their numbers of runs, in the order of the program.
        unknown_loops: Loops whose number of turns the program does not say; their bodies are counted once.
    """

    operators: Counter[str]
    collectives: tuple[tuple[Instruction, int], ...]
    unknown_loops: int

    def collectives_of(self, rank: int, partitions: Sequence[int]) -> Counter[Collective]:
        """Return the number of runs of each kind of collective of a rank.

        Args:
            rank: Number of the rank.
            partitions: Rank of each partition of the program.

        Raises:
            ValueError: groups are written in an unknown way.
        """
        found: Counter[Collective] = Counter()
        if rank in partitions:
            for one, times in self.collectives:
                found[_collective(one, partitions.index(rank), partitions)] += times
        return found


def read_program(text: str) -> Program:
    """Read the text of a compiled module.

    Raises:
        ValueError: the module is written in an unknown way.
    """
    entry, computations = _computations(text)
    operators: Counter[str] = Counter()
    collectives: list[tuple[Instruction, int]] = []
    unknown = 0

    def run(name: str, times: int) -> None:
        nonlocal unknown
        for one in computations.get(name, ()):
            inner = times
            if one.opcode == "while":
                turns = _turns(one, computations)
                unknown += turns is None
                inner *= 1 if turns is None else turns
            if one.opcode.removesuffix("-start") in KINDS:
                collectives.append((one, times))
            elif one.opcode not in FREE and not one.opcode.endswith(("-start", "-done", "-update")):
                operators[one.opcode] += times
            if one.opcode in _RUNS:
                for called in _called(one):
                    run(called, inner)

    run(entry, 1)
    return Program(operators, tuple(collectives), unknown)


def num_bytes(types: str) -> int:
    """Return the bytes of all arrays in the text of a type; tokens and opaque values have none."""
    return sum(_array_bytes(*one) for one in _TYPE.findall(types))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(found[1]) if (found := _BITS.match(dtype)) else 0
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    entry, found = "", dict[str, list[Instruction]]()
    inside: list[Instruction] = []
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            inside = found.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif made := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            inside.append(Instruction(*made.groups()))
    if not entry:
        raise ValueError("the compiled program has no entry")
    return entry, found


def _called(one: Instruction) -> Iterator[str]:
    for several, single in _CALLED.findall(one.rest):
        yield from (name.strip().lstrip("%") for name in (several or single).split(","))


def _turns(loop: Instruction, computations: Mapping[str, list[Instruction]]) -> int | None:
    """Return how often a loop turns: XLA's own figure, or the constant below which its counter stays."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    inside = computations.get(condition[1], []) if condition else []
    compared = next((one for one in inside if one.opcode == "compare" and "direction=LT" in one.rest), None)
    limits = [one for one in inside if one.opcode == "constant" and one.types.startswith("s32[]")]
    if compared is None or len(limits) != 1:
        return None
    value = re.match(r"(\d+)\)", limits[0].rest)
    return int(value[1]) if value else None


def _collective(one: Instruction, place: int, partitions: Sequence[int]) -> Collective:
    """Return the collective of an instruction for the partition at a place."""
    opcode, types = one.opcode.removesuffix("-start"), one.types
    if one.opcode.endswith("-start") and types.startswith("((" if opcode == "all-reduce" else "("):
        types = _result(types)
    size = num_bytes(types)
    if opcode == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", one.rest)
        numbers = [int(number) for number in re.findall(r"\d+", pairs[1])] if pairs else []
        to = dict(zip(numbers[::2], numbers[1::2], strict=True)).get(place, place)
        own = tuple(sorted({partitions[place], partitions[to]}))
        return Collective(opcode, size, own, -1 if to == place else partitions[to])
    whole = "replica_groups={}" in one.rest
    group = tuple(range(len(partitions))) if whole else next(g for g in groups_of(one.rest) if place in g)
    if opcode == "reduce-scatter":
        size *= len(group)
    return Collective(opcode, size, tuple(partitions[device] for device in group))


def _result(types: str) -> str:
    """Return the results' types of a start, whose type is (operands, results, and sometimes states)."""
    parts = _split(types[1:-1])
    return parts[1] if len(parts) > 1 and len(parts[1]) > 2 else types


def _split(text: str) -> list[str]:
    found, depth, begun = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append(text[begun:place].strip())
            begun = place + 1
    return [*found, text[begun:].strip()]
