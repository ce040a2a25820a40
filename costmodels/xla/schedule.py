"""Read the scheduled program that XLA's compiler for GPUs makes: traffic of its kernels, and a replay of its streams.

Kernels run in the order of their computation on one stream. Collectives run in their order on another from their
`-start` on, and at their `-done` the first stream waits for them. A loop's body runs as often as the loop says, and the
longest of several branches runs. Bytes are those of the arrays that a kernel takes and returns, and those of the part
where it only slices an array or updates it in place.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from costmodels.blocks.operator import OpKind
from costmodels.xla.groups import axes_of, groups_of
from costmodels.xla.program import Instruction, called_by, computations_of, dims_of, loop_of, num_bytes_of

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
CALLING = ("call", "conditional", "async-start")
"""Instructions that run other computations."""
PARTS = ("dynamic-slice", "gather", "slice")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel of the program.

    Attributes:
        name: Name of its instruction.
        is_product: Whether it is a matrix product or a convolution of a library.
        num_bytes: Bytes that it reads and writes.
        flop: Floating-point operations of a matrix product or a convolution of a library.
        precision: Precision of these, as the catalog of devices names it; empty without them.
        times: Number of executions in a step.
    """

    name: str
    is_product: bool
    num_bytes: float
    flop: float
    precision: str
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
                body, iterations = loop_of(each, computations)
                run(body, times * iterations)
            elif each.opcode in CALLING:
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
    """Run the two streams of a program.

    Args:
        text: Text of the program, without comments.
        mesh: Sizes of the axes of its mesh, in the order of its devices.
        kernel_s: Time of one execution of a kernel [s].
        collective_s: Time of a collective of a kind on a message of this many bytes along these axes [s].

    Raises:
        ValueError: The text cannot be read.
    """
    entry, computations = computations_of(text)
    kernels = {each.name: kernel_s(each) for each in kernels_of(text)}
    replay = _Replay(computations=computations, kernels=kernels, mesh=mesh, collective_s=collective_s)
    end = replay.run(entry, _Streams())
    return Replayed(
        compute_s=end.compute_s,
        comm_s=end.comm_s,
        step_time_s=max(end.now_s, end.ready_s),
        collectives=end.collectives,
        synchronous=end.synchronous,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Streams:
    """State of the two streams.

    Attributes:
        now_s: Time at which the kernels so far have ended [s].
        ready_s: Time at which the collectives so far have ended [s].
        compute_s: Time of the kernels so far [s].
        comm_s: Time of the collectives so far [s].
        collectives: Number of collectives so far.
        synchronous: Number of those that the kernels waited for at once.
    """

    now_s: float = 0.0
    ready_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    collectives: int = 0
    synchronous: int = 0

    def again(self, before: _Streams, times: int) -> _Streams:
        """Return the state after this many more runs, each with what has changed since `before`."""
        return _Streams(
            **{
                each.name: getattr(self, each.name) + times * (getattr(self, each.name) - getattr(before, each.name))
                for each in fields(self)
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    """A replay of a program; `kernels` has the time of one execution of each kernel [s]."""

    computations: Mapping[str, list[Instruction]]
    kernels: Mapping[str, float]
    mesh: Mapping[str, int]
    collective_s: Callable[[OpKind, float, tuple[int, ...]], float]

    def run(self, name: str, streams: _Streams) -> _Streams:
        """Return the state of the streams after a computation."""
        inside = self.computations[name]
        types = {each.name: each.types for each in inside}
        ends: dict[str, float] = {}
        for each in inside:
            if each.opcode.endswith("-done"):
                streams = replace(streams, now_s=max(streams.now_s, ends.get(each.operands[0], streams.now_s)))
            elif _collective(each) is not None:
                streams = self._send(each, types, streams)
                ends[each.name] = streams.ready_s
            elif each.opcode == "while":
                streams = self._loop(each, streams)
            elif each.opcode in CALLING:
                called = [self.run(one, streams) for one in called_by(each)]
                streams = max(called, key=lambda one: one.now_s, default=streams)
            elif each.name in self.kernels:
                seconds = self.kernels[each.name]
                streams = replace(streams, now_s=streams.now_s + seconds, compute_s=streams.compute_s + seconds)
        return streams

    def _loop(self, each: Instruction, streams: _Streams) -> _Streams:
        """Run a loop: its first two iterations, and the others as its second, which begins as they do."""
        body, times = loop_of(each, self.computations)
        if times == 0:
            return streams
        first = self.run(body, streams)
        if times == 1:
            return first
        return self.run(body, first).again(first, times - 2)

    def _send(self, each: Instruction, types: Mapping[str, str], streams: _Streams) -> _Streams:
        """Run a collective after all those before it, and as a kernel where nothing runs beside it."""
        kind, names = _collective(each), list(self.mesh)
        assert kind is not None, "only collectives are sent"
        sent_bytes = sum(num_bytes_of(types[operand]) for operand in each.operands)
        axes: Sequence[str] = names
        if kind is not OpKind.SEND_RECV:
            groups = groups_of(each.line)
            found = axes_of(groups, self.mesh)
            axes = found if all(name in self.mesh for name in found) else names
            sent_bytes *= len(groups[0]) if kind is OpKind.ALL_GATHER else 1
        seconds = self.collective_s(kind, sent_bytes, tuple(map(names.index, axes)))
        ready_s = max(streams.now_s, streams.ready_s) + seconds
        is_waited = not each.opcode.endswith("-start") or '"is_sync":true' in each.line
        return replace(
            streams,
            now_s=ready_s if is_waited else streams.now_s,
            ready_s=ready_s,
            comm_s=streams.comm_s + seconds,
            collectives=streams.collectives + 1,
            synchronous=streams.synchronous + is_waited,
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
    flop = _flop(each, types) if "cublas" in each.line else 0.0
    if "__cudnn$conv" in each.line:
        flop = _convolution_flop(each, types)
    return Kernel(
        name=each.name,
        is_product=is_product,
        num_bytes=sum(sizes) + written,
        flop=flop,
        precision=_precision(types[each.operands[0]]) if flop else "",
        times=times,
    )


def _part_of(fused: Sequence[Instruction], slot: int, size: float) -> float:
    """Return the bytes that a fused computation reads of an operand."""
    name = next((one.name for one in fused if one.opcode == "parameter" and f"parameter({slot})" in one.line), None)
    names = {name}  # of the operand in all of its views
    for one in fused:
        if one.opcode == "bitcast" and one.operands[0] in names:
            names.add(one.name)
    users = [one for one in fused if one.name not in names and not names.isdisjoint(one.operands)]
    if users and all(one.opcode in PARTS and one.operands[0] in names for one in users):
        return min(size, sum(num_bytes_of(one.types) for one in users))
    if users and all(one.opcode == "dynamic-update-slice" and one.operands[0] in names for one in users):
        return 0.0
    return size


def _written(fused: Sequence[Instruction]) -> float:
    """Return the bytes that a fused computation writes."""
    known = {one.name: one for one in fused}
    root = fused[-1]
    roots = [known[name] for name in root.operands if name in known] if root.opcode == "tuple" else [root]
    roots = [_viewed(one, known) for one in roots]
    return sum(
        num_bytes_of(known[one.operands[1]].types if one.opcode == "dynamic-update-slice" else one.types)
        for one in roots
    )


def _viewed(one: Instruction, known: Mapping[str, Instruction]) -> Instruction:
    """Return the instruction whose result another one only views."""
    while one.opcode == "bitcast" and one.operands[0] in known:
        one = known[one.operands[0]]
    return one


def _flop(each: Instruction, types: Mapping[str, str]) -> float:
    """Return the operations of a matrix product of a library, of which batch dims are named for the left operand.

    The numbers of elements of both operands and of the result, each divided by the batch, are mk, kn and mn.
    """
    left, right = (_shape(types[operand]) for operand in each.operands[:2])
    named = re.search(r'"lhs_batch_dimensions":\[([^\]]*)\]', each.line)
    dims = [int(dim.strip('"')) for dim in named[1].split(",")] if named and named[1] else []
    batch = math.prod(left[dim] for dim in dims)
    elements = math.prod(left) * math.prod(right) * math.prod(_shape(each.types))
    return 2 * math.sqrt(elements / batch)


def _convolution_flop(each: Instruction, types: Mapping[str, str]) -> float:
    """Return the operations of a convolution of a library, whose labels are those of the forward pass in all passes."""
    first, second = (_shape(types[operand]) for operand in each.operands[:2])
    result = _shape(each.types)
    output, kernel = result, second
    if "convBackwardInput" in each.line:
        output, kernel = first, second
    elif "convBackwardFilter" in each.line:
        output, kernel = second, result
    labels = re.search(r"dim_labels=\w+_(\w+)->", each.line)
    if labels is None:
        raise ValueError(f"can't read the dims of {each.line.strip()[:200]}")
    return 2 * math.prod(output) * math.prod(size for size, name in zip(kernel, labels[1], strict=True) if name != "o")


def _shape(types: str) -> tuple[int, ...]:
    """Return the shape of the first array in the text of a type."""
    found = re.search(r"[a-z]\w*\[([\d,]*)\]", types)
    return dims_of(found[1]) if found else ()


def _precision(types: str) -> str:
    """Return the precision of products of an array, as the catalog of devices names it."""
    name = types.partition("[")[0]
    return "fp8" if name.startswith("f8") else {"bf16": "bf16", "f16": "fp16"}.get(name, "fp32")
