"""What XLA sends for a JAX program, by the program that its partitioner writes, beside what a plan says.

The dump right after partitioning is read, not the final program: there types are the program's own (the CPU's backend
widens bfloat16) and collectives aren't merged into tuples yet. The CPU gets no reduce-scatters: where a plan has one,
XLA adds everything up and slices, so that reduce-scatters are counted as the all-reduces that stand for them.

Bytes are those that a device sends in a ring: of n devices and a message as hardware/collectives.py defines it,
2 (n-1)/n of it for an all-reduce and (n-1)/n for all else. XLA gathers two axes at once or one after the other, which
comes to the same. Programs with loops are refused: how often their bodies run isn't written there.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from costmodels.operators import OpKind
from costmodels.plan import PlanCost

REDUCED, GATHERED, EXCHANGED = "reduced", "gathered", "exchanged"
"""All-reduces and reduce-scatters; all-gathers; all-to-alls and permutations."""

GROUP_OF = {
    "all-reduce": REDUCED,
    "reduce-scatter": REDUCED,
    "all-gather": GATHERED,
    "all-to-all": EXCHANGED,
    "collective-permute": EXCHANGED,
}
OF_PLAN = {
    OpKind.ALL_REDUCE: REDUCED,
    OpKind.REDUCE_SCATTER: REDUCED,
    OpKind.ALL_GATHER: GATHERED,
    OpKind.ALL_TO_ALL: EXCHANGED,
}

TYPE_BYTES = {"pred": 1, "bf16": 2}
"""Of the types whose name doesn't end in their bits."""


def planned_bytes(cost: PlanCost, sizes: tuple[int, ...]) -> Counter[str]:
    """What each device sends by a plan, by kind, reduce-scatters as all-reduces [bytes]."""
    found: Counter[str] = Counter()
    for each in cost.collectives:
        group = math.prod(sizes[axis] for axis in each.move.axes)
        name = OF_PLAN[each.move.kind]
        found[name] += each.times * _ring_bytes(name, each.move.message_bytes, group)
    return found


def compiled_bytes(lowered: Any) -> Counter[str]:
    """What each device sends in a program that `jax.jit(...).lower(...)` gives, by kind [bytes].

    Raises:
        ValueError: the program has a loop, or says something of a collective that can't be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"})
        (dump,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        return bytes_of(dump.read_text(encoding="utf-8"))


def bytes_of(text: str) -> Counter[str]:
    """The same of the text of a partitioned program.

    Raises:
        ValueError: see `compiled_bytes`.
    """
    found: Counter[str] = Counter()
    sums: dict[str, tuple[float, int]] = {}
    kinds = "|".join(GROUP_OF)
    for line in text.splitlines():
        if " while(" in line:
            raise ValueError(f"a program with a loop can't be counted: {line.strip()[:120]}")
        match = re.search(rf"(\S+) = (.+?) ({kinds})(-start)?\(([^)]*)\)", line)
        if match is None:
            continue
        name, types, kind, is_started, operand = match.groups()
        if is_started:
            raise ValueError(f"an asynchronous collective can't be counted: {line.strip()[:120]}")
        num_bytes = sum(_bytes_of(*each) for each in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", types))
        if kind == "collective-permute":
            found[EXCHANGED] += num_bytes
            continue
        group = group_size(line)
        if kind == "all-reduce":
            # sums of sums are one all-reduce along both axes, which XLA splits where these go to different dims
            before_bytes, before = sums.pop(operand, (0.0, 1))
            found[REDUCED] -= _ring_bytes(REDUCED, before_bytes, before)
            group *= before
            sums[name] = num_bytes, group
        message_bytes = num_bytes * group if kind == "reduce-scatter" else num_bytes
        found[GROUP_OF[kind]] += _ring_bytes(GROUP_OF[kind], message_bytes, group)
    return found


def group_size(line: str) -> int:
    """Devices in a group of a collective, in any of the four forms in which XLA writes groups.

    Raises:
        ValueError: it is none of them.
    """
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    if iota:
        return int(iota[2])
    by_axes = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\)*\))?\s*\{([^}]*)\}", line)
    if by_axes:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", by_axes[1])}
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", by_axes[2])
        if axes and all(name in sizes for name, _ in axes):
            return math.prod(int(part) if part else sizes[name] for name, part in axes)
    raise ValueError(f"can't read the groups of {line.strip()[:200]}")


def _ring_bytes(name: str, message_bytes: float, group: int) -> float:
    return (2 if name == REDUCED else 1) * message_bytes * (group - 1) / group


def _bytes_of(dtype: str, dims: str) -> float:
    bits = re.search(r"(\d+)$", dtype)
    element_bytes = TYPE_BYTES.get(dtype) or int(bits[1]) / 8 if bits or dtype in TYPE_BYTES else None
    if element_bytes is None:
        raise ValueError(f"can't tell the size of {dtype}")
    return element_bytes * math.prod(int(size) for size in dims.split(",") if size)
