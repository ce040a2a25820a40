"""What a device does in one pass of one micro-batch through a block: kernels and collectives in order, on two streams.

A segment is a stretch of kernels with the collectives that run beside them, or one of both alone; the next segment
begins when both streams are through. Which collective runs beside which kernels is the runtime's affair
(`RuntimeProfile.overlaps_*`):

* tp gathers the input of a block's first product and scatters the output of its last one (Korthikanti et al. 2022,
  section 4.2.2); backward it gathers the output's gradient for the last product, and scatters the gradient of the first
  one's input. That input may be gathered once more (`gathers_inputs_again`). Overlapped, each runs beside the product
  that it feeds or that feeds it.
* The ring of cp runs beside the attention core, whose first step needs no exchange (Liu et al. 2023).
* Ulysses exchanges heads before the core, experts exchange tokens around their products; overlapped, that runs beside
  the products of another micro-batch's layer.

Durations and collectives are those of costmodels/operators/layer_operators.py, kernels.py and communication.py, of one
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import (
    CollectiveTime,
    KernelTime,
    collective_latency_s,
    collective_s,
    execution_s,
    kernel_s,
)
from costmodels.operators.layer_operators import (
    Block,
    Collective,
    OpKind,
    Phase,
    is_core,
    is_recomputed,
    step_operators,
)
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.changed_layers import added_s, change_of, compute_ratio, exposed_ratio
from costmodels.step.communication import issued_collectives, layer_collectives
from costmodels.step.placement import Groups
from hardware.cluster import GroupLinks
from hardware.device import Device

INSIDE, BETWEEN, ACROSS = "inside a host", "between hosts", "across switches"
LINKS = (INSIDE, BETWEEN, ACROSS)
"""The links that a collective crosses; across switches it crosses a host's network too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel, or all executions of one collective that follow each other.

    Attributes:
        name: Operator or site of the collective.
        kind: What it is.
        part: The part of the step's breakdown that it counts to.
        seconds: What it takes alone.
        latency_s: The part of that in which a collective's links are idle.
        link: One of LINKS for a collective, nothing for a kernel.
    """

    name: str
    kind: OpKind
    part: str
    seconds: float
    latency_s: float = 0.0
    link: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Kernels, one after the other, and collectives beside them, likewise."""

    kernels: tuple[Work, ...] = ()
    traffic: tuple[Work, ...] = ()

    @property
    def kernels_s(self) -> float:
        """The kernels alone."""
        return sum(work.seconds for work in self.kernels)

    @property
    def traffic_s(self) -> float:
        """The collectives alone."""
        return sum(work.seconds for work in self.traffic)

    def duration_s(self, overlap_efficiency: float) -> float:
        """Both streams beside each other, where nothing else is at work."""
        kernels_s, traffic_s = self.kernels_s, self.traffic_s
        return kernels_s + traffic_s - overlap_efficiency * min(kernels_s, traffic_s)


Program = tuple[Segment, ...]


class Piece(StrEnum):
    """What stages are made of."""

    DENSE_LAYER = "dense layer"
    MOE_LAYER = "layer with experts"
    EMBEDDING = "embedding"
    HEAD = "head"


def piece_programs(
    job: TrainingJob,
    runtime: RuntimeProfile,
    config: ParallelConfig,
    groups: Groups,
    device: Device,
    *,
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
) -> dict[tuple[Piece, Phase], Program]:
    """The program of every piece in each pass; what is recomputed runs in the backward pass.

    Args:
        job: What is trained.
        runtime: What runs beside what.
        config: The configuration.
        groups: Its groups, one entry each.
        device: Where it runs.
        kernel_time: Time of a kernel.
        collective_time: Time of a collective.
    """
    builder = _Builder(job, runtime, config, groups, device, kernel_time, collective_time)
    programs = {(Piece.EMBEDDING, phase): builder.embedding(phase) for phase in Phase}
    programs |= {(Piece.HEAD, phase): builder.head(phase) for phase in Phase}
    programs |= {(Piece.DENSE_LAYER, phase): builder.layer(Block.DENSE_MLP, phase) for phase in Phase}
    if job.model.is_moe:
        programs |= {(Piece.MOE_LAYER, phase): builder.layer(Block.MOE_MLP, phase) for phase in Phase}
    return {
        key: tuple(segment for segment in program if segment.kernels or segment.traffic)
        for key, program in programs.items()
    }


def piece_launches(
    job: TrainingJob, runtime: RuntimeProfile, config: ParallelConfig
) -> dict[Piece, tuple[float, float]]:
    """How many kernels and how many collectives the host launches for one micro-batch of each piece, in both passes."""
    grid = ConfigGrid.from_configs([config])
    kernels = dict.fromkeys(Block, 0.0)
    for op in step_operators(job, runtime, grid):
        kernels[op.block] += 1.0 + float(is_recomputed(job, op, grid)[0])
    issued = issued_collectives(job, runtime, grid)
    each = {block: (kernels[block], float(issued[block][0])) for block in Block}
    attention = each[Block.ATTENTION]
    layers = {
        piece: (attention[0] + each[block][0], attention[1] + each[block][1])
        for piece, block in ((Piece.DENSE_LAYER, Block.DENSE_MLP), (Piece.MOE_LAYER, Block.MOE_MLP))
    }
    return layers | {Piece.EMBEDDING: each[Block.EMBEDDING], Piece.HEAD: each[Block.HEAD]}


class _Builder:
    """Writes programs down, block by block."""

    def __init__(
        self,
        job: TrainingJob,
        runtime: RuntimeProfile,
        config: ParallelConfig,
        groups: Groups,
        device: Device,
        kernel_time: KernelTime,
        collective_time: CollectiveTime,
    ) -> None:
        self.job, self.runtime, self.config = job, runtime, config
        grid = ConfigGrid.from_configs([config])
        self.change = change_of(runtime.layer_changes, grid)
        self.links = {part: link_between(getattr(groups, part)) for part in EXPOSED_PARTS}
        self.operators = step_operators(job, runtime, grid)
        self.recomputed = {op.name for op in self.operators if is_recomputed(job, op, grid)[0]}
        self.kernels = {
            op.name: Work(
                name=op.name,
                kind=op.kind,
                part="compute",
                seconds=float(execution_s(op, device, job, runtime, grid, kernel_time)[0]),
            )
            for op in self.operators
        }
        self.collectives = {
            site: Work(
                name=site,
                kind=collective.kind,
                part=site.split(".")[0].removeprefix("expert_"),
                seconds=float(collective_time(collective)[0]),
                latency_s=float(collective_latency_s(collective)[0]),
                link=link_of(collective),
            )
            for site, collective in layer_collectives(job, runtime, grid, groups).items()
        }

    def layer(self, mlp: Block, phase: Phase) -> Program:
        """A whole layer in one pass."""
        blocks = {Block.ATTENTION: self._attention, mlp: self._moe if mlp == Block.MOE_MLP else self._dense}
        forward = [self._changed(build(Phase.FORWARD), block, Phase.FORWARD) for block, build in blocks.items()]
        if phase == Phase.FORWARD:
            return self._beside_products(sum(forward, ()), mlp, passes=1)
        again = self._again(forward, (Block.ATTENTION, mlp))
        backward = sum(
            (self._changed(build(Phase.BACKWARD), block, Phase.BACKWARD) for block, build in reversed(blocks.items())),
            (),
        )
        return self._beside_products(again + backward, mlp, passes=2 if self._is_full else 1)

    def embedding(self, phase: Phase) -> Program:
        """The lookup; its output is scattered over tp, and that gradient gathered."""
        return self._changed(self._embedding(phase), Block.EMBEDDING, phase)

    def head(self, phase: Phase) -> Program:
        """The last norm, the product with the vocabulary, and the loss."""
        return self._changed(self._head(phase), Block.HEAD, phase)

    def _embedding(self, phase: Phase) -> Program:
        kernels = Segment(kernels=self._of(Block.EMBEDDING, phase))
        if phase == Phase.FORWARD:
            return kernels, Segment(traffic=self._tensor(scatters=1, reductions=1))
        return Segment(traffic=self._tensor(gathers=1)), kernels

    def _head(self, phase: Phase) -> Program:
        kernels = self._of(Block.HEAD, phase)
        if phase == Phase.BACKWARD:
            return Segment(kernels=kernels), Segment(traffic=self._tensor(scatters=1, reductions=1))
        at = _first_product(kernels)
        return (
            Segment(kernels=kernels[:at]),
            Segment(traffic=self._tensor(gathers=1)),
            Segment(kernels=kernels[at : at + 1]),
            Segment(traffic=self._calls("tp.softmax", 3)),
            Segment(kernels=kernels[at + 1 :]),
        )

    def _changed(self, program: Program, block: Block, phase: Phase) -> Program:
        """The program of a block with what a sharding plan changes of it."""
        if self.change is None:
            return program
        added = tuple(
            Work(
                name=f"{part}.planned",
                kind=OpKind.ALL_GATHER,
                part=part,
                seconds=seconds / self.runtime.network_efficiency,
                link=self.links[part],
            )
            for part, seconds in added_s(self.change, block, phase).items()
            if seconds > 0
        )
        return (*self._scaled(program, block, phase), Segment(traffic=added))

    def _scaled(self, program: Program, block: Block, phase: Phase) -> Program:
        """The program of a block by the ratios of a sharding plan."""
        change = self.change
        if change is None:
            return program
        return tuple(
            Segment(
                kernels=_scaled(segment.kernels, compute_ratio(change, block, phase)),
                traffic=tuple(
                    scaled
                    for work in segment.traffic
                    for scaled in _scaled((work,), exposed_ratio(change, block, work.part))
                    if scaled.seconds > 0
                ),
            )
            for segment in program
        )

    @property
    def _is_full(self) -> bool:
        return self.config.recompute == "full"

    def _again(self, forward: Sequence[Program], blocks: Sequence[Block]) -> Program:
        """What the backward pass runs again: whole layers with their collectives, or some operators."""
        if self._is_full:
            return sum(forward, ())
        return sum((self._scaled(self._selected(block), block, Phase.BACKWARD) for block in blocks), ())

    def _selected(self, block: Block) -> Program:
        """The operators of a block that selective recomputation runs again."""
        kernels = tuple(work for work in self._of(block, Phase.FORWARD) if work.name in self.recomputed)
        core = tuple(work for work in kernels if work.name in self._core_names)
        others = tuple(work for work in kernels if work not in core)
        return (*(self._exchanged(core, Phase.FORWARD) if core else ()), Segment(kernels=others))

    def _attention(self, phase: Phase) -> Program:
        kernels = self._of(Block.ATTENTION, phase)
        core = [at for at, work in enumerate(kernels) if work.name in self._core_names]
        before, inside, after = kernels[: core[0]], kernels[core[0] : core[-1] + 1], kernels[core[-1] + 1 :]
        between = self._exchanged(inside, phase)
        if phase == Phase.FORWARD:
            return self._gathered(before) + between + self._scattered(after)
        return self._output_gradients(before) + between + self._input_gradients(after)

    def _exchanged(self, core: tuple[Work, ...], phase: Phase) -> Program:
        """The attention core with its exchanges: of heads, and around the ring."""
        return Segment(traffic=self._calls("up.all_to_all")), *self._ring(core, phase)

    def _dense(self, phase: Phase) -> Program:
        kernels = self._of(Block.DENSE_MLP, phase)
        middle = next(at for at, work in enumerate(kernels) if ".activation" in work.name)
        first, last = kernels[:middle], kernels[middle:]
        if phase == Phase.FORWARD:
            return self._gathered(first) + self._scattered(last)
        return self._output_gradients(first) + self._input_gradients(last)

    def _moe(self, phase: Phase) -> Program:
        """Experts' tokens are exchanged and gathered before their products, and all that undone behind them."""
        kernels = self._of(Block.MOE_MLP, phase)
        is_expert = [work.kind == OpKind.GROUPED_MATMUL for work in kernels]
        start, end = is_expert.index(True), len(kernels) - is_expert[::-1].index(True)
        exchange = () if self.runtime.overlaps_experts else self._calls("ep.all_to_all")
        shared = self._tensor(gathers=1, scatters=1, reductions=1) if self.job.model.shared_expert_ffn_size else ()
        return (
            Segment(kernels=kernels[:start]),
            Segment(traffic=exchange + self._calls("expert_tp.all_gather")),
            Segment(kernels=kernels[start:end]),
            Segment(traffic=self._calls("expert_tp.reduce_scatter") + exchange + shared),
            Segment(kernels=kernels[end:]),
        )

    def _gathered(self, kernels: tuple[Work, ...]) -> Program:
        """Kernels up to a block's middle: the input is gathered for the first product."""
        at = _first_product(kernels)
        traffic = self._tensor(gathers=1)
        product = self._beside(kernels[at : at + 1], traffic, overlaps=self.runtime.overlaps_tensor)
        return (Segment(kernels=kernels[:at]), *product, Segment(kernels=kernels[at + 1 :]))

    def _scattered(self, kernels: tuple[Work, ...]) -> Program:
        """Kernels from a block's middle on: the output of the last product is scattered."""
        at = _last_product(kernels)
        traffic = self._tensor(scatters=1, reductions=1)
        product = self._beside(
            kernels[at : at + 1], traffic, overlaps=self.runtime.overlaps_tensor, traffic_first=False
        )
        return (Segment(kernels=kernels[:at]), *product, Segment(kernels=kernels[at + 1 :]))

    def _output_gradients(self, kernels: tuple[Work, ...]) -> Program:
        """Kernels of the backward pass up to a block's middle: the output's gradient is gathered."""
        at, end = _first_product(kernels), _last_product(kernels) + 1
        traffic = self._tensor(gathers=1)
        return (
            Segment(kernels=kernels[:at]),
            *self._beside_gradients(kernels[at:end], traffic),
            Segment(kernels=kernels[end:]),
        )

    def _input_gradients(self, kernels: tuple[Work, ...]) -> Program:
        """Kernels from there on: the input's gradient is scattered, and perhaps the input gathered for its weights."""
        at, end = _first_product(kernels), _last_product(kernels) + 1
        traffic = self._tensor(gathers=float(self.runtime.gathers_inputs_again), scatters=1, reductions=1)
        return (
            Segment(kernels=kernels[:at]),
            *self._beside_gradients(kernels[at:end], traffic),
            Segment(kernels=kernels[end:]),
        )

    def _beside_gradients(self, products: tuple[Work, ...], traffic: tuple[Work, ...]) -> Program:
        """Gradients' products and what may run beside all of them, or beside those of the weights."""
        if self.runtime.overlaps_tensor or not self.runtime.overlaps_tensor_gradients:
            return self._beside(products, traffic, overlaps=self.runtime.overlaps_tensor)
        of_weights = tuple(work for work in products if work.name.endswith("weight_gradient"))
        others = tuple(work for work in products if work not in of_weights)
        return (Segment(kernels=others), Segment(kernels=of_weights, traffic=traffic))

    @staticmethod
    def _beside(
        kernels: tuple[Work, ...], traffic: tuple[Work, ...], *, overlaps: bool, traffic_first: bool = True
    ) -> Program:
        if overlaps:
            return (Segment(kernels=kernels, traffic=traffic),)
        alone = (Segment(traffic=traffic), Segment(kernels=kernels))
        return alone if traffic_first else alone[::-1]

    def _ring(self, core: tuple[Work, ...], phase: Phase) -> Program:
        """The attention core, and keys and values around the ring, backward with their gradients.

        A hidden exchange still waits for each of its messages to begin.
        """
        cp, rounds = self.config.cp, 1 if phase == Phase.FORWARD else 2
        if rounds == 2 and "cp.gradients" in self.collectives:
            exchanges = self._calls("cp.send_recv", cp - 1) + self._calls("cp.gradients", cp - 1)
        else:
            exchanges = self._calls("cp.send_recv", rounds * (cp - 1))
        if not exchanges or not self.runtime.overlaps_ring:
            return Segment(traffic=exchanges), Segment(kernels=core)
        beside = Segment(kernels=_scaled(core, (cp - 1) / cp), traffic=exchanges)
        exposed_s = beside.duration_s(self.runtime.overlap_efficiency) - beside.kernels_s
        begins = self._calls("cp.start", rounds * (cp - 1))
        begins_s = sum(work.seconds for work in begins)
        left = _scaled(begins, (begins_s - exposed_s) / begins_s) if begins_s > exposed_s else ()
        return Segment(kernels=_scaled(core, 1 / cp)), beside, Segment(traffic=left)

    def _beside_products(self, program: Program, mlp: Block, passes: int) -> Program:
        """The program with the experts' exchanges beside its products, each its share, where they overlap."""
        ratio = exposed_ratio(self.change, mlp, "ep") if self.change else 1.0
        exchanges = self._calls("ep.all_to_all", 2 * passes * ratio)
        if mlp != Block.MOE_MLP or not self.runtime.overlaps_experts or not exchanges:
            return program
        products_s = sum(work.seconds for segment in program for work in segment.kernels if self._is_product(work))
        found: list[Segment] = []
        for segment in program:
            if not any(self._is_product(work) for work in segment.kernels):
                found.append(segment)
                continue
            own_s = sum(work.seconds for work in segment.kernels if self._is_product(work))
            others = tuple(work for work in segment.kernels if not self._is_product(work))
            products = tuple(work for work in segment.kernels if self._is_product(work))
            traffic = segment.traffic + _scaled(exchanges, own_s / products_s)
            found += [Segment(kernels=others), Segment(kernels=products, traffic=traffic)]
        return tuple(found)

    def _is_product(self, work: Work) -> bool:
        return work.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL) and work.name not in self._core_names

    @property
    def _core_names(self) -> frozenset[str]:
        return frozenset(op.name for op in self.operators if is_core(op))

    def _of(self, block: Block, phase: Phase) -> tuple[Work, ...]:
        """The kernels of a block in one pass, in the order in which they run."""
        found = [op for op in self.operators if op.block == block]
        names = [op.name for op in found if op.phase == Phase.FORWARD]
        if phase == Phase.FORWARD:
            return tuple(self.kernels[name] for name in names)

        def place(name: str) -> int:
            """Of the forward operator whose gradient this is."""
            return max(range(len(names)), key=lambda at: len(names[at]) if name.startswith(names[at]) else -1)

        gradients = [op.name for op in found if op.phase == Phase.BACKWARD]
        return tuple(self.kernels[name] for name in sorted(gradients, key=lambda name: -place(name)))

    def _calls(self, site: str, times: float = 1.0) -> tuple[Work, ...]:
        """So many executions of a collective as one; none where it takes no time."""
        one = self.collectives.get(site)
        return _scaled((one,), times) if one is not None and times * one.seconds > 0 else ()

    def _tensor(self, *, gathers: float = 0.0, scatters: float = 0.0, reductions: float = 0.0) -> tuple[Work, ...]:
        """Collectives of tp: gathering and scattering under sequence parallelism, all-reduces without it."""
        if self.config.sequence_parallel:
            return self._calls("tp.all_gather", gathers) + self._calls("tp.reduce_scatter", scatters)
        return self._calls("tp.all_reduce", reductions)


def link_of(collective: Collective) -> str:
    """The links that a collective of one group crosses."""
    return link_between(collective.group)


def link_between(group: GroupLinks) -> str:
    """The links that one group's ranks communicate over."""
    if group.switches[0] > 1:
        return ACROSS
    return BETWEEN if group.hosts[0] > 1 else INSIDE


def _scaled(works: Sequence[Work], factor: float) -> tuple[Work, ...]:
    return tuple(replace(work, seconds=work.seconds * factor, latency_s=work.latency_s * factor) for work in works)


def _first_product(kernels: Sequence[Work]) -> int:
    return next((at for at, work in enumerate(kernels) if work.kind == OpKind.MATMUL), len(kernels))


def _last_product(kernels: Sequence[Work]) -> int:
    return next((at for at in range(len(kernels) - 1, -1, -1) if kernels[at].kind == OpKind.MATMUL), len(kernels) - 1)
