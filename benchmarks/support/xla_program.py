"""Count the bytes sent and the operations of a device in a planned JAX program, from the output of XLA's partitioner.

The dump right after partitioning is parsed instead of the final program. Its types are the program's own (the CPU's
backend widens bfloat16), and its collectives are not merged into tuples yet. The body of a loop counts as often as it
runs. Branches that send or multiply are refused, as is everything that cannot be parsed.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.sent_bytes import EXCHANGED, GATHERED, PERMUTED, REDUCED, Axes, Sent, ring_bytes
from costmodels.xla.groups import axes_of, groups_of
from costmodels.xla.program import Instruction, called_by, computations_of, dims_of, num_bytes_of, trip_count

KIND_OF = {
    "all-reduce": REDUCED,
    "reduce-scatter": REDUCED,
    "all-gather": GATHERED,
    "all-to-all": EXCHANGED,
    "ragged-all-to-all": EXCHANGED,
    "collective-broadcast": EXCHANGED,
    "collective-permute": EXCHANGED,
}
PRODUCTS = ("dot", "convolution")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDevice:
    """Work of a device in a step.

    Attributes:
        sent: Bytes sent, by kind and axes.
        flop: Floating-point operations of products and convolutions.
    """

    sent: Sent
    flop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compiled program.

    Attributes:
        run: Function that runs it on arrays.
        text: Text of the partitioned program.
        device: Work of one device.
        counted_flop: XLA's own count of operations, which includes all operators and counts a loop's body once.
        memory_bytes: Arguments, outputs that take no argument's place, and temporaries [bytes]. The CPU's backend
            widens bfloat16 and reuses less memory than others.
    """

    run: Callable[..., Any]
    text: str
    device: OnDevice
    counted_flop: float
    memory_bytes: float


def compiled(lowered: Any, mesh: Mapping[str, int]) -> Compiled:
    """Compile the result of `jax.jit(...).lower(...)` for the devices of a mesh in their order.

    Raises:
        ValueError: The partitioned program cannot be parsed.
    """
    import jax  # noqa: PLC0415 # as below

    jax.config.update("jax_enable_compilation_cache", False)  # a program out of a cache leaves no text
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"})
        (dump,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        text = dump.read_text(encoding="utf-8")
    memory = program.memory_analysis()
    return Compiled(
        run=program,
        text=text,
        device=on_device(text, mesh),
        counted_flop=float(program.cost_analysis()["flops"]),
        memory_bytes=float(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        ),
    )


def on_device(text: str, mesh: Mapping[str, int]) -> OnDevice:
    """Count the work of a device from the text of a partitioned program.

    Raises:
        ValueError: The text cannot be parsed.
    """
    entry, computations = computations_of(text)
    sent: Sent = Counter()
    flop = 0.0
    for name, times in _executions(entry, computations).items():
        for (kind, axes), num_bytes in _sent(computations[name], mesh).items():
            sent[kind, axes] += times * num_bytes
        flop += times * _flop(computations[name])
    return OnDevice(sent=sent, flop=flop)


def _executions(entry: str, computations: Mapping[str, list[Instruction]]) -> dict[str, int]:
    """Count the executions of each computation that the entry reaches."""
    found: Counter[str] = Counter()

    def run(name: str, times: int) -> None:
        found[name] += times
        for each in computations[name]:
            inner = times
            if each.opcode == "while":
                inner *= trip_count(each, computations)
            for called in called_by(each):
                if each.opcode == "conditional" and _is_working(called, computations):
                    raise ValueError(f"a branch that sends or multiplies can't be counted: {each.line.strip()[:120]}")
                run(called, inner)

    run(entry, 1)
    return dict(found)


def _is_working(name: str, computations: Mapping[str, list[Instruction]]) -> bool:
    return any(
        each.opcode in KIND_OF
        or each.opcode in PRODUCTS
        or any(_is_working(one, computations) for one in called_by(each))
        for each in computations[name]
    )


def _sent(instructions: list[Instruction], mesh: Mapping[str, int]) -> Sent:
    """Count the bytes that one execution of a computation sends."""
    found: Sent = Counter()
    before: dict[str, tuple[str, Axes, float, int]] = {}
    for each in instructions:
        opcode = each.opcode
        if opcode.removesuffix("-start") in KIND_OF and opcode not in KIND_OF:
            raise ValueError(f"an asynchronous collective can't be counted: {each.line.strip()[:120]}")
        if opcode not in KIND_OF:
            continue
        num_bytes, kind = num_bytes_of(each.types), KIND_OF[opcode]
        if opcode == "collective-permute":
            found[kind, PERMUTED] += num_bytes
            continue
        groups = groups_of(each.line)
        axes, group = axes_of(groups, mesh), len(groups[0])
        if any(len(other) != group for other in groups):
            raise ValueError(f"groups of unlike sizes can't be counted: {each.line.strip()[:200]}")
        if opcode == "reduce-scatter":
            num_bytes *= group
        operand = before.pop(each.operands[0], None)
        if operand is not None and operand[0] == kind and kind != EXCHANGED and operand[1] != axes:
            # a sum of sums is one sum along both axes, as is a gather of gathers; XLA splits those that go to two dims
            found[kind, operand[1]] -= operand[2]
            axes = tuple(name for name in mesh if name in operand[1] or name in axes)
            group *= operand[3]
        sent_bytes = ring_bytes(kind, num_bytes, group)
        found[kind, axes] += sent_bytes
        before[each.name] = kind, axes, sent_bytes, group
    return found


def _flop(instructions: list[Instruction]) -> float:
    """Count the operations of the products in one execution, a multiplication and an addition as two."""
    # Operands are named only; their shapes come from the lines that made them.
    shapes: dict[str, tuple[int, ...]] = defaultdict(tuple)
    total = 0.0
    for each in instructions:
        shape = re.match(r"[a-z]\w*\[([\d,]*)\]", each.types)
        if shape:
            shapes[each.name] = dims_of(shape[1])
        if each.opcode in PRODUCTS:
            left, right = (shapes[name] for name in each.operands)
            total += 2 * math.prod(shapes[each.name]) * _products(each, left, right)
    return total


def _products(each: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Count the products added up for one element, without those by zeros between a convolution's dilated elements."""
    if each.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.line)
        return math.prod(left[dim] for dim in dims_of(summed[1])) if summed else 1
    labels = re.search(r"dim_labels=\w+_(\w+)->", each.line)
    if labels is None:
        raise ValueError(f"can't read the dims of {each.line.strip()[:200]}")
    dilated = re.search(r"lhs_dilate=([\dx]+)", each.line)
    zeros = math.prod(int(size) for size in dilated[1].split("x")) if dilated else 1
    return math.prod(size for size, label in zip(right, labels[1], strict=True) if label != "o") / zeros
