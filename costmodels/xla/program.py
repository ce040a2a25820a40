"""Parse the text of a program of XLA: its computations, and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

TYPE_BYTES = {"pred": 1, "bf16": 2}
"""Sizes of the types whose names do not end in their bits [bytes]."""

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{\s*$")
CALLS = re.compile(r"(?:to_apply|body|calls|\w+_computations?)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Name of the result.
        types: Text of the result's type or types.
        opcode: Name of the operation.
        operands: Names of the operands.
        line: The whole line of text.
    """

    name: str
    types: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def computations_of(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """Return the name of the entry computation and the instructions of each computation."""
    entry, found = "", dict[str, list[Instruction]]()
    inside: list[Instruction] = []
    for line in text.splitlines():
        opened = COMPUTATION.match(line)
        if opened:
            inside = found.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
            continue
        match = INSTRUCTION.match(line)
        if match:
            name, types, opcode, rest = match.groups()
            operands = tuple(part.split()[-1].lstrip("%") for part in rest.partition(")")[0].split(", ") if part)
            inside.append(Instruction(name=name, types=types, opcode=opcode, operands=operands, line=line))
    if not entry:
        raise ValueError("the program has no ENTRY")
    return entry, found


def called_by(instruction: Instruction) -> Iterator[str]:
    """Yield the names of the computations that an instruction calls."""
    for names in CALLS.findall(instruction.line):
        for name in names.split(", "):
            yield name.lstrip("%")


def trip_count(loop: Instruction, computations: Mapping[str, list[Instruction]]) -> int:
    """Return the number of iterations of a loop.

    It is XLA's own figure, or the constant below which the loop's counter must stay, as in JAX's scans.

    Raises:
        ValueError: Neither is present.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.line)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    inside = {each.name: each for each in computations[condition[1]]} if condition else {}
    last = next((each for each in inside.values() if each.line.lstrip().startswith("ROOT")), None)
    if last is not None and last.opcode == "compare" and "direction=LT" in last.line:
        limit = inside.get(last.operands[1])
        constant = re.search(r"constant\((\d+)\)", limit.line) if limit else None
        if constant:
            return int(constant[1])
    raise ValueError(f"can't tell how often a loop runs: {loop.line.strip()[:120]}")


def loop_of(loop: Instruction, computations: Mapping[str, list[Instruction]]) -> tuple[str, int]:
    """Return the computation that a loop repeats, and the number of its iterations.

    Raises:
        ValueError: The loop does not say them.
    """
    body = re.search(r"body=%?([\w.\-]+)", loop.line)
    if body is None:
        raise ValueError(f"can't tell what a loop repeats: {loop.line.strip()[:120]}")
    return body[1], trip_count(loop, computations)


def num_bytes_of(types: str) -> float:
    """Return the size of all arrays in the text of a type [bytes]."""
    return sum(_array_bytes(*each) for each in re.findall(r"([a-z]\w*)\[([\d,]*)\]", types))


def _array_bytes(dtype: str, dims: str) -> float:
    bits = re.search(r"^[fsu](\d+)", dtype)
    element_bytes = TYPE_BYTES.get(dtype) or (int(bits[1]) / 8 if bits else None)
    if element_bytes is None:
        raise ValueError(f"can't tell the size of {dtype}")
    return element_bytes * math.prod(dims_of(dims))


def dims_of(text: str) -> tuple[int, ...]:
    """Parse sizes that commas separate."""
    return tuple(int(size) for size in text.split(",") if size)
