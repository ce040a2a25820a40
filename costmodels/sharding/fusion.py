"""Memory traffic of a graph whose elementwise operators a compiler fuses, as XLA does.

A compiler runs a chain of elementwise operators as one kernel: what one of them writes and the next one reads never
goes through memory. Which tensors these are is decided for the whole graph, before any of it is sharded:

    kernels     An operator that computes each element by itself joins the kernel of those that read it, unless another
                kernel, such as a product or a sum, stands between both on some way. Its level, the number of kernels
                from the start of the program, is then the same. One that all its readers can join runs as late as the
                first of them. A sum joins what it adds up, and ends the kernel.
    reads       A kernel reads a tensor once, however many of its operators read it.
    writes      A tensor is written if another kernel, the next step or the caller reads it.
    views       A transposition or a reshape is a way of reading, and moves nothing.
    places      A gather reads as much of its table as it returns, and an update in place writes as much as it is given.
    stacks      What an iteration of a loop adds to a stack is a kernel of its own, which computes it anew if it can.
    launches    The last operator of a kernel that moves anything pays for the kernel's launch.
    memory      What never leaves a kernel and what is a view takes none, nor does what an update in place takes over.
                What all its readers can compute cheaply is not kept for them, if fewer bytes move so.

Products, sorts, scans and all else are kernels of their own. Sources: the fusible operators and the order of XLA's
priority fusion (openxla/xla, `xla/backends/gpu/transforms/priority_fusion.h`). XLA computes some values anew instead of
reading them. For memory that counts; in the traffic of its kernels it came closer on no program but one
(docs/research/planners.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import CONSTANT, STATE, FusionKind, Graph, Op

INLINED = (FusionKind.LOOP, FusionKind.PICK)
"""Operators whose results a reader can compute by itself."""
INLINING = (*INLINED, FusionKind.SUM, FusionKind.STACK)
"""Operators that can compute what they read by themselves."""


PRODUCT, ADDITIONS, BROADCAST, TRANSPOSITION = "dot_general", ("add", "add_any"), "broadcast_in_dim", "transpose"
"""Primitives of matrix products, of the additions that can end one, and of what makes a matrix of a vector."""

COSTLY = frozenset(
    """
    tanh expm1 log log1p logistic erf erf_inv erfc pow sin cos tan cbrt atan2
    """.split()  # noqa: SIM905  # a line for each name would hide what follows
)
"""Primitives whose arithmetic takes longer than to read their result."""

MOST_READ = 4
"""Most tensors that a kernel reads to compute another one anew (assumed)."""

LAUNCH_S = 1e-6
"""Time between two kernels of a compiled program [s] (`kKernelLaunchOverhead` of openxla/xla,
`xla/service/gpu/model/gpu_performance_model_base.h`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that an operator moves through memory in one execution on whole tensors.

    Attributes:
        reads: Bytes read of each operand; 0 for what its kernel holds already.
        writes: Bytes written of each result; 0 for what never leaves the kernel.
        launches: Kernels that a compiled program launches for it, 0 or 1; 0 where nothing is compiled.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: int = 0


@lru_cache(maxsize=8)
def traffic_of(graph: Graph) -> tuple[Traffic, ...]:
    """Return the traffic of each operator [ops]; where nothing is fused, all operands are read and results written."""
    if graph.is_fused:
        return _Fusion(graph).traffic()
    sizes = [tensor.num_bytes for tensor in graph.tensors]
    return tuple(
        Traffic(reads=tuple(sizes[one] for one in op.operands), writes=tuple(sizes[one] for one in op.results))
        for op in graph.ops
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetime:
    """First and last operator during which a tensor stays in memory."""

    first: int
    last: int


def fused_on(graph: Graph, mesh: DeviceMesh) -> Graph:
    """Return a graph as it is fused on the devices of a mesh: on processors, XLA fuses less, and here nothing."""
    return unfused(graph) if mesh.has_processors else graph


@lru_cache(maxsize=8)
def lifetimes(graph: Graph) -> tuple[Lifetime | None, ...]:
    """Return the lifetime of each tensor [t]; None for one that takes no memory of its own.

    These are the updated value of a state, which overwrites the state, and what never leaves a kernel or only shows
    another tensor. What a kernel reads lives until all of the kernel has run.
    """
    return _Fusion(graph).lifetimes()


@lru_cache(maxsize=8)
def unfused(graph: Graph) -> Graph:
    """Return a graph as it is where no compiler fuses anything."""
    return replace(graph, ops=tuple(replace(op, fusion=FusionKind.NONE) for op in graph.ops))


class _Fusion:
    """Kernels of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.num_bytes = [tensor.num_bytes for tensor in graph.tensors]
        # Tensor that a view shows; any other tensor shows itself.
        self.shown = list(range(len(graph.tensors)))
        for op in graph.ops:
            if op.fusion is FusionKind.VIEW:
                self.shown[op.results[0]] = self.shown[op.operands[0]]
        self.makers = [graph.maker[tensor][0] for tensor in self.shown]
        self.readers: list[list[int]] = [[] for _ in graph.tensors]
        # What the next step or the caller reads is written.
        self.is_kept = [False] * len(graph.tensors)
        for tensor, uses in enumerate(graph.uses):
            others = [use.op for use in uses if graph.ops[use.op].fusion is not FusionKind.VIEW]
            self.readers[self.shown[tensor]] += others
            self.is_kept[self.shown[tensor]] |= not uses or any(use.is_back for use in uses)
        self.product_of = self._products()
        self.products = set(self.product_of.values())
        self.level = self._levels()
        self.kernel = self._kernels()

    def _products(self) -> dict[int, int]:
        """Return the product that each addition ends, by the number of the addition."""
        ops, tensors = self.graph.ops, self.graph.tensors
        found: dict[int, int] = {}
        for number, op in enumerate(ops):
            if op.primitive not in ADDITIONS or op.fusion is not FusionKind.LOOP or len(op.operands) < 2:
                continue
            for tensor in op.operands:
                maker, view = self.makers[tensor], self.graph.maker[tensor][0]
                if view != maker and ops[view].primitive == TRANSPOSITION:
                    continue
                is_alone = self.readers[self.shown[tensor]] == [number] and not self.is_kept[self.shown[tensor]]
                is_alike = tensors[tensor].element_bytes == tensors[op.results[0]].element_bytes
                if ops[maker].primitive == PRODUCT and is_alone and is_alike and ops[maker].times == op.times:
                    found[number] = maker
                    break
        return found

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the traffic of each operator."""
        held: set[tuple[int, int]] = set()
        found = [
            Traffic(
                reads=tuple(self._read(number, op, slot, held) for slot in range(len(op.operands))),
                writes=tuple(self._written(number, op, tensor) for tensor in op.results),
            )
            for number, op in enumerate(self.graph.ops)
        ]
        # Later operators of a kernel overwrite earlier ones.
        last = {self.kernel[number]: number for number, one in enumerate(found) if any((*one.reads, *one.writes))}
        for number in last.values():
            found[number] = replace(found[number], launches=0 if self.graph.ops[number].is_free else 1)
        return tuple(found)

    def lifetimes(self) -> tuple[Lifetime | None, ...]:
        """Return the lifetime of each tensor that takes memory."""
        graph, end = self.graph, len(self.graph.ops) - 1
        updated = {op.operands[0] for op in graph.ops if op.primitive == STATE and op.operands}
        is_stored = [
            graph.ops[maker].begins
            or (self.shown[tensor] == tensor and tensor not in updated and self._is_stored(maker, tensor))
            for tensor, (maker, _) in enumerate(graph.maker)
        ]
        read_by = self._read_by()
        self._make_anew(is_stored, read_by)
        ends = {kernel: number for number, kernel in enumerate(self.kernel)}
        found: list[Lifetime | None] = []
        for tensor, maker in enumerate(self.makers):
            if not is_stored[tensor]:
                found.append(None)
            elif graph.ops[maker].begins:  # all step long
                found.append(Lifetime(first=0, last=end))
            else:
                # A tensor lives from its kernel, or from its first reader in another one, to the last kernel.
                runs = ends[self.kernel[maker]]
                others = [each for each in self.readers[tensor] if self.kernel[each] != self.kernel[maker]]
                first = min([runs, *(reader for reader in others if reader > maker)])
                last = max((ends[kernel] for kernel in read_by[tensor]), default=first)
                found.append(Lifetime(first=first, last=max(first, last)))
        for number, op in enumerate(graph.ops):
            target = found[self.shown[op.operands[0]]] if op.fusion is FusionKind.PUT else None
            # An update in place takes over the memory of what nobody reads any more.
            maker = self.makers[op.operands[0]] if op.operands else number
            if target is not None and target.last == number and not graph.ops[maker].begins:
                is_new = graph.ops[maker].primitive == CONSTANT or target.first == number
                found[self.shown[op.operands[0]]] = None if is_new else replace(target, last=number - 1)
        return tuple(found)

    def _is_stored(self, maker: int, tensor: int) -> bool:
        """Return whether a kernel writes a tensor to memory."""
        op = self.graph.ops[maker]
        if op.primitive == CONSTANT and self.readers[tensor]:
            return any(self.graph.ops[reader].fusion not in INLINING for reader in self.readers[tensor])
        is_inside = all(self._joins(maker, reader) for reader in self.readers[tensor]) and not self.is_kept[tensor]
        return not (is_inside and (op.fusion in INLINED or maker in self.products))

    def _read_by(self) -> list[set[int]]:
        """Return the kernels that read each tensor."""
        found: list[set[int]] = [set() for _ in self.num_bytes]
        for number, op in enumerate(self.graph.ops):
            for tensor in op.operands if op.fusion is not FusionKind.VIEW else ():
                if self.makers[tensor] < number and not self._joins(self.makers[tensor], number):
                    found[self.shown[tensor]].add(self.kernel[number])
        return found

    def _make_anew(self, is_stored: list[bool], read_by: list[set[int]]) -> None:
        """Strike out the tensors that kernels compute anew, and let these kernels read what that needs.

        Those are tensors that all their readers can compute, where fewer bytes move so.
        """
        # What a kernel would have to read to compute a tensor, and how many bytes of it.
        needed: dict[int, dict[int, float]] = {op.results[0]: {} for op in self.graph.ops if op.primitive == CONSTANT}
        for number, op in enumerate(self.graph.ops):
            own = None if number in self.product_of else self._needed(op, is_stored, needed)
            if own is None:
                continue
            tensor = op.results[0]
            needed[tensor] = own
            readers = self.readers[tensor]
            if not is_stored[tensor] or self.is_kept[tensor] or not readers:
                continue
            more = sum(num_bytes * len(read_by[tensor] - read_by[each]) for each, num_bytes in own.items())
            is_less = more < self.num_bytes[tensor] * (1 + len(read_by[tensor]))
            if is_less and all(reader > number and self._can_join(number, reader) for reader in readers):
                is_stored[tensor] = False
                for each in own:
                    read_by[each] |= read_by[tensor]

    def _needed(
        self, op: Op, is_stored: Sequence[bool], needed: Mapping[int, Mapping[int, float]]
    ) -> dict[int, float] | None:
        """Return the bytes to read of each tensor for an operator's result; None where it is not computed anew."""
        shown = [self.shown[operand] for operand in op.operands]
        is_known = all(each in needed or is_stored[each] for each in shown)
        if op.fusion not in INLINED or op.primitive in COSTLY or not is_known:
            return None
        found: dict[int, float] = {}
        most = self.num_bytes[op.results[0]] if op.fusion is FusionKind.PICK else math.inf
        for each in shown:
            reads = {each: min(self.num_bytes[each], most)} if is_stored[each] else needed[each]
            found |= {one: max(found.get(one, 0.0), num_bytes) for one, num_bytes in reads.items()}
        return found if len(found) <= MOST_READ else None

    def _levels(self) -> list[int]:
        """Return the number of kernels before each operator."""
        ops = self.graph.ops
        found = [0] * len(ops)
        for number, op in enumerate(ops):
            for tensor in op.operands:
                # A state, and a loop's start, read what is made later.
                maker = self.makers[tensor]
                if maker < number:
                    found[number] = max(found[number], found[maker] + (not self._can_join(maker, number)))
        for number in reversed(range(len(ops))):
            readers = [reader for tensor in ops[number].results for reader in self.readers[tensor]]
            if readers and all(reader > number and self._can_join(number, reader) for reader in readers):
                found[number] = max(found[number], min(found[reader] for reader in readers))
        return found

    def _kernels(self) -> list[int]:
        """Return the kernel of each operator, as the number of one of its operators."""
        parent = list(range(len(self.graph.ops)))

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = number = parent[parent[number]]
            return number

        for number, op in enumerate(self.graph.ops):
            for tensor in op.operands if op.fusion is not FusionKind.STACK else ():
                if self._joins(self.makers[tensor], number):
                    parent[root(number)] = root(self.makers[tensor])
        return [root(number) for number in range(len(parent))]

    def _can_join(self, maker: int, reader: int) -> bool:
        """Return whether an operator can be part of the kernel of one that reads its result."""
        before, after = self.graph.ops[maker], self.graph.ops[reader]
        if reader in self.product_of:
            is_vector = before.primitive == BROADCAST and before.times == after.times
            return maker == self.product_of[reader] or is_vector
        if maker in self.product_of:
            return False
        return before.fusion in INLINED and after.fusion in INLINING and before.times == after.times

    def _joins(self, maker: int, reader: int) -> bool:
        """Return whether an operator is part of the kernel of one that reads its result."""
        return maker < reader and self._can_join(maker, reader) and self.level[maker] == self.level[reader]

    def _read(self, number: int, op: Op, slot: int, held: set[tuple[int, int]]) -> float:
        """Return the bytes that an operator reads of an operand, beyond what its kernel holds."""
        tensor = op.operands[slot]
        shown, maker = self.shown[tensor], self.makers[tensor]
        is_made_anew = op.fusion in INLINING and self.graph.ops[maker].primitive == CONSTANT
        is_target = op.fusion is FusionKind.PUT and not slot
        if op.fusion is FusionKind.STACK and not is_made_anew:
            return self.num_bytes[tensor]
        if op.fusion is FusionKind.VIEW or is_made_anew or is_target or self._joins(maker, number):
            return 0.0
        if op.fusion is FusionKind.PICK and not slot:
            return min(self.num_bytes[tensor], sum(self.num_bytes[result] for result in op.results))
        if (self.kernel[number], shown) in held:
            return 0.0
        held.add((self.kernel[number], shown))
        return self.num_bytes[tensor]

    def _written(self, number: int, op: Op, tensor: int) -> float:
        """Return the bytes that an operator writes of a result."""
        is_inside = all(self._joins(number, reader) for reader in self.readers[tensor]) and not self.is_kept[tensor]
        if op.fusion is FusionKind.VIEW or (is_inside and (op.fusion in INLINED or number in self.products)):
            return 0.0
        if op.fusion is FusionKind.STACK:
            return min(self.num_bytes[op.operands[0]], self.num_bytes[tensor])
        if op.fusion is not FusionKind.PUT:
            return self.num_bytes[tensor]
        # What is put into a constant, such as zeros, needs the constant written as well.
        target, *others = op.operands
        is_new = self.graph.ops[self.makers[target]].primitive == CONSTANT
        put = self.num_bytes[tensor] if is_new else max((self.num_bytes[one] for one in others), default=0.0)
        return min(put, self.num_bytes[tensor])
