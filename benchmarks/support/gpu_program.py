"""Read the scheduled program that XLA's compiler for GPUs makes: traffic of its kernels, and a replay of its streams.

Kernels of the entry computation run in its order on one stream. Collectives run in their order on another from their
`-start` on, and at their `-done` the first stream waits for them. Bytes are those of the arrays that a kernel takes and
returns; of an array that it only slices or updates in place they are those of the part.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.support.xla_groups import axes_of
from benchmarks.support.xla_program import Instruction, called_by, computations_of, dims_of, num_bytes_of, trip_count
from costmodels.blocks.operator import OpKind
from trials.jax_training.xla_groups import groups_of

FREE = frozenset(
    """
    parameter constant get-tuple-element tuple bitcast while partition-id after-all conditional call copy-start
    copy-done iota
    """.split()  # noqa: SIM905  # a line for each name would hide what follows
)
"""Instructions that run no kernel; copies to other memory are not made on GPUs."""
COLLECTIVES = {
    "all-reduce": OpKind.ALL_REDUCE,
    "all-gather": OpKind.ALL_GATHER,
    "reduce-scatter": OpKind.REDUCE_SCATTER,
    "all-to-all": OpKind.ALL_TO_ALL,
    "collective-permute": OpKind.SEND_RECV,
}
PARTS = ("dynamic-slice", "gather", "slice")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel of the program.

    Attributes:
        name: Name of its instruction.
        is_product: Whether it is a matrix product or a convolution of a library.
        num_bytes: Bytes that it reads and writes.
        flop: Floating-point operations of a matrix product.
        times: Number of executions in a step.
    """

    name: str
    is_product: bool
    num_bytes: float
    flop: float
    times: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Times of the two streams.

    Attributes:
        compute_s: Time of all kernels [s].
        comm_s: Time of all collectives [s].
        step_time_s: Time of the step [s].
        collectives: Number of collectives.
        synchronous: Number of those that the first stream waits for at once.
    """

    compute_s: float
    comm_s: float
    step_time_s: float
    collectives: int
    synchronous: int


def without_comments(text: str) -> str:
    """Return the text of a program without the numbers of long tuples."""
    return re.sub(r"/\*index=\d+\*/", "", text)


def kernels_of(text: str) -> list[Kernel]:
    """Return all kernels of a program."""
    entry, computations = computations_of(text)
    runs: Counter[str] = Counter()

    def run(name: str, times: int) -> None:
        runs[name] += times
        for each in computations[name]:
            if each.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", each.line)
                if body:
                    run(body[1], times * trip_count(each, computations))
            elif each.opcode in ("call", "conditional", "async-start"):
                for called in called_by(each):
                    run(called, times)

    run(entry, 1)
    return [
        _kernel(each, computations[name], computations, times)
        for name, times in runs.items()
        for each in computations[name]
        if each.opcode not in FREE and not each.opcode.endswith("-done") and _collective(each) is None
    ]


def replayed(
    text: str,
    mesh: Mapping[str, int],
    *,
    kernel_s: Callable[[Kernel], float],
    collective_s: Callable[[OpKind, float, tuple[int, ...]], float],
) -> Replayed:
    """Run the two streams of a program's entry computation.

    Args:
        text: Text of the program, without comments.
        mesh: Sizes of the axes of its mesh, in the order of its devices.
        kernel_s: Time of one execution of a kernel [s].
        collective_s: Time of a collective of a kind on a message of this many bytes along these axes [s].
    """
    entry, computations = computations_of(text)
    kernels = {each.name: each for each in kernels_of(text)}
    types = {each.name: each.types for each in computations[entry]}
    names = list(mesh)
    now_s = ready_s = compute_s = comm_s = 0.0
    ends: dict[str, float] = {}
    count = waited = 0
    for each in computations[entry]:
        kind = _collective(each)
        if kind is None:
            if each.name in kernels:
                compute_s += kernel_s(kernels[each.name])
                now_s += kernel_s(kernels[each.name])
            continue
        if each.opcode.endswith("-done"):
            now_s = max(now_s, ends.get(each.operands[0], now_s))
            continue
        sent_bytes = sum(num_bytes_of(types[operand]) for operand in each.operands)
        axes: Sequence[str] = names
        if kind is not OpKind.SEND_RECV:
            groups = groups_of(each.line)
            found = axes_of(groups, mesh)
            axes = found if all(name in mesh for name in found) else names
            sent_bytes *= len(groups[0]) if kind is OpKind.ALL_GATHER else 1
        seconds = collective_s(kind, sent_bytes, tuple(map(names.index, axes)))
        ready_s = max(now_s, ready_s) + seconds
        comm_s += seconds
        ends[each.name] = ready_s
        count += 1
        if not each.opcode.endswith("-start") or '"is_sync":true' in each.line:
            now_s = ready_s
            waited += 1
    return Replayed(
        compute_s=compute_s, comm_s=comm_s, step_time_s=max(now_s, ready_s), collectives=count, synchronous=waited
    )


def _collective(each: Instruction) -> OpKind | None:
    return COLLECTIVES.get(each.opcode.removesuffix("-start").removesuffix("-done"))


def _kernel(
    each: Instruction, inside: Sequence[Instruction], computations: Mapping[str, list[Instruction]], times: int
) -> Kernel:
    types = {one.name: one.types for one in inside}
    is_product = "cublas" in each.line or "__cudnn" in each.line or each.opcode in ("dot", "convolution")
    fused = [computations[name] for name in called_by(each) if each.opcode == "fusion" and name in computations]
    sizes = [num_bytes_of(types[operand]) for operand in each.operands]
    if fused:
        sizes = [_part_of(fused[0], slot, size) for slot, size in enumerate(sizes)]
        written = _written(fused[0])
    else:
        # Libraries return their working memory as an array of bytes beside the product.
        arrays = re.findall(r"[a-z]\w*\[[\d,]*\]", each.types)
        written = sum(num_bytes_of(one) for one in arrays if not (is_product and one.startswith(("s8[", "u8["))))
    return Kernel(
        name=each.name,
        is_product=is_product,
        num_bytes=sum(sizes) + written,
        flop=_flop(each, types) if "cublas" in each.line else 0.0,
        times=times,
    )


def _part_of(fused: Sequence[Instruction], slot: int, size: float) -> float:
    """Return the bytes that a fused computation reads of an operand."""
    name = next((one.name for one in fused if one.opcode == "parameter" and f"parameter({slot})" in one.line), None)
    users = [one for one in fused if name in one.operands]
    if users and all(one.opcode in PARTS and one.operands[0] == name for one in users):
        return min(size, sum(num_bytes_of(one.types) for one in users))
    if users and all(one.opcode == "dynamic-update-slice" and one.operands[0] == name for one in users):
        return 0.0
    return size


def _written(fused: Sequence[Instruction]) -> float:
    """Return the bytes that a fused computation writes."""
    known = {one.name: one for one in fused}
    root = fused[-1]
    roots = [known[name] for name in root.operands if name in known] if root.opcode == "tuple" else [root]
    return sum(
        num_bytes_of(known[one.operands[1]].types if one.opcode == "dynamic-update-slice" else one.types)
        for one in roots
    )


def _flop(each: Instruction, types: Mapping[str, str]) -> float:
    """Return the operations of a matrix product of a library, of which batch dims are named for the left operand.

    The numbers of elements of both operands and of the result, each divided by the batch, are mk, kn and mn.
    """

    def shape(text: str) -> tuple[int, ...]:
        found = re.search(r"[a-z]\w*\[([\d,]*)\]", text)
        return dims_of(found[1]) if found else ()

    left, right = (shape(types[operand]) for operand in each.operands[:2])
    named = re.search(r'"lhs_batch_dimensions":\[([^\]]*)\]', each.line)
    dims = [int(dim.strip('"')) for dim in named[1].split(",")] if named and named[1] else []
    batch = math.prod(left[dim] for dim in dims)
    elements = math.prod(left) * math.prod(right) * math.prod(shape(each.types))
    return 2 * math.sqrt(elements / batch)
