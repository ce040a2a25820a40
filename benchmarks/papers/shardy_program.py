"""Count the collectives that Shardy's own passes insert into a planned JAX program, by kind and axes.

Nothing is compiled. Shardy, the partitioner's successor to GSPMD, propagates the program's shardings to all values,
inserts a reshard wherever an operator needs another sharding, and writes each reshard as collectives on whole types
with the names of axes. XLA partitions later with code of its own, so that the two judges are independent. Loops count
as often as they run. The passes are registered in the MLIR bindings that come with JAX.

Source: the pass pipelines of openxla/shardy (propagation, export), as jaxlib 0.10 names them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.support.sent_bytes import EXCHANGED, GATHERED, PERMUTED, REDUCED, Axes, Sent, ring_bytes

PASSES = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives))"
)

KIND_OF = {
    "sdy.all_reduce": REDUCED,
    "sdy.reduce_scatter": REDUCED,
    "sdy.all_gather": GATHERED,
    "sdy.all_to_all": EXCHANGED,
    "sdy.collective_permute": EXCHANGED,
}
FREE = ("sdy.all_slice", "sdy.constant", "sdy.return", "sdy.sharding_constraint")
"""Operations that move nothing between devices."""

AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
ELEMENT_BITS = re.compile(r"[a-z]+(\d+)$")


def shardy_bytes(lowered: Any, mesh: Mapping[str, int]) -> Sent:
    """Count the bytes that each device sends in the result of `jax.jit(...).lower(...)`, by kind and axes [bytes].

    Raises:
        ValueError: The passes leave an operation that cannot be parsed.
    """
    # JAX is optional, and its bindings are slow to import
    from jax._src.interpreters import mlir  # noqa: PLC0415 # the dialects' context has no public maker
    from jaxlib.mlir import ir, passmanager  # noqa: PLC0415

    with mlir.make_ir_context():
        module = ir.Module.parse(lowered.as_text())
        passmanager.PassManager.parse(PASSES).run(module.operation)
        return _sent(module, mesh)


def _sent(module: Any, mesh: Mapping[str, int]) -> Sent:
    functions = {
        str(op.attributes["sym_name"]).strip('"'): op for op in module.body.operations if "func" in op.operation.name
    }
    found: Sent = Counter()

    def run(operation: Any, times: int) -> None:
        for op in _inside(operation):
            name = op.operation.name
            if name == "stablehlo.while":
                run_region(op.operation.regions[1], times * _trip_count(op))
            elif name in ("stablehlo.case", "stablehlo.if"):
                if any(inner.operation.name in KIND_OF for inner in _everything(op)):
                    raise ValueError(f"a branch that sends can't be counted: {str(op)[:120]}")
            elif name == "sdy.manual_computation":
                run_region(op.operation.regions[0], times)
            elif name == "func.call":
                run(functions[str(op.attributes["callee"]).lstrip("@")], times)
            elif name in KIND_OF:
                kind, axes, num_bytes = _collective(op, mesh)
                found[kind, axes] += times * num_bytes
            elif name.startswith("sdy.") and name not in FREE:
                raise ValueError(f"can't tell what is sent by {str(op)[:200]}")

    def run_region(region: Any, times: int) -> None:
        for block in region.blocks:
            run(block, times)

    run(functions["main"], 1)
    return found


def _inside(operation: Any) -> Iterator[Any]:
    """Yield the operations of a function, or of a block."""
    if hasattr(operation, "operations"):
        yield from operation.operations
        return
    for region in operation.operation.regions:
        for block in region.blocks:
            yield from block.operations


def _everything(operation: Any) -> Iterator[Any]:
    for op in _inside(operation):
        yield op
        yield from _everything(op)


def _trip_count(loop: Any) -> int:
    """Return the constant below which a scan's counter must stay."""
    text = str(loop.operation.regions[0].blocks[0])
    compared = re.search(r"stablehlo\.compare\s+LT, %\w+, %(\w+),", text)
    constant = re.search(rf"%{compared[1]} = \S+ dense<(\d+)>", text) if compared else None
    if constant is None:
        raise ValueError(f"can't tell how often a loop runs: {text[:200]}")
    return int(constant[1])


def _collective(op: Any, mesh: Mapping[str, int]) -> tuple[str, Axes, float]:
    """Return kind, axes and the bytes that a device sends."""
    text = str(op).split(" loc(", maxsplit=1)[0]
    # The axes stand before the output sharding in the text, and its type behind it.
    before, arrow, after = text.partition(" out_sharding=<@")
    shape = re.search(r": tensor<([^>]*)>", after)
    if not arrow or shape is None:
        raise ValueError(f"can't read {text[:200]}")
    name = op.operation.name
    kind = KIND_OF[name]
    # Types are global: the size on a device is that of the whole tensor over the parts of its output sharding.
    local_bytes = _num_bytes(shape[1], text) / _ways(after.partition(" : ")[0].partition("[")[2], mesh)
    if name == "sdy.collective_permute":
        return kind, PERMUTED, local_bytes
    along = re.search(re.escape(name) + r" (.*) %", before)
    moved = AXIS.findall(along[1]) if along else []
    if not moved:
        raise ValueError(f"can't read the axes of {text[:200]}")
    group = math.prod(int(size) if size else mesh[axis] for axis, _, size in moved)
    axes = tuple(axis for axis in mesh if axis in {axis for axis, _, _ in moved})
    message_bytes = local_bytes * group if name == "sdy.reduce_scatter" else local_bytes
    return kind, axes, ring_bytes(kind, message_bytes, group)


def _ways(sharding: str, mesh: Mapping[str, int]) -> int:
    """Count the parts into which a sharding cuts a tensor; replicated and unreduced axes do not cut."""
    dims = sharding.partition("replicated=")[0].partition("unreduced=")[0]
    return math.prod(int(size) if size else mesh[axis] for axis, _, size in AXIS.findall(dims))


def _num_bytes(tensor: str, text: str) -> float:
    *dims, dtype = tensor.split("x")
    bits = ELEMENT_BITS.match(dtype)
    if bits is None:
        raise ValueError(f"can't tell the size of {dtype} in {text[:200]}")
    return math.prod(map(int, dims)) * max(int(bits[1]), 8) / 8
