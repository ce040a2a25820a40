"""Programs of a device for one pass through a block: kernels and collectives in order, on two streams.

A segment is a stretch of kernels with the collectives that run beside them, or one of both alone. The next segment
begins when both streams are through. The runtime decides which collective runs beside which kernels
(`RuntimeProfile.overlaps_*`):

* tp gathers the input of a block's first product and scatters the output of its last one (Korthikanti et al. 2022,
  section 4.2.2). Backward it gathers the output's gradient for the last product, and scatters the gradient of the
  first one's input. That input may be gathered once more (`gathers_inputs_again`). Overlapped, each collective runs
  beside the product that it feeds or that feeds it.
* The ring of cp runs beside the attention core, whose first step needs no exchange (Liu et al. 2023).
* Ulysses exchanges heads before the core, and experts exchange tokens around their products. Overlapped, the experts'
  exchange runs beside the products of another micro-batch's layer.

Durations and collectives are those of costmodels/operators/layer_operators.py, kernels.py and communication.py, of one
configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.operator import Family, OpKind, Phase
from costmodels.job.model_spec import ModelSpec, Piece
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_latency_s, collective_s
from costmodels.simulator.operator_prices import OperatorPrices
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.changed_layers import added_s, change_of, compute_ratio, exposed_ratio
from costmodels.step.communication import block_sites, layer_collectives
from costmodels.step.placement import Groups
from hardware.arrays import FloatArray
from hardware.device import Device
from hardware.group_links import GroupLinks

INSIDE, BETWEEN, ACROSS = "inside a host", "between hosts", "across switches"
LINKS = (INSIDE, BETWEEN, ACROSS)
"""Links that a collective crosses. Across switches it crosses a host's network too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel, or all executions of one collective that follow each other.

    Attributes:
        name: Name of the operator, or site of the collective.
        kind: Kind of operator.
        part: Part of the step's breakdown to which it counts.
        seconds: Duration if it runs alone [s].
        latency_s: Part of the duration in which a collective's links are idle [s].
        link: One of LINKS for a collective, empty for a kernel.
    """

    name: str
    kind: OpKind
    part: str
    seconds: float
    latency_s: float = 0.0
    link: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Kernels, one after the other, and collectives beside them, one after the other too."""

    kernels: tuple[Work, ...] = ()
    traffic: tuple[Work, ...] = ()

    @property
    def kernels_s(self) -> float:
        """Time of the kernels alone [s]."""
        return sum(work.seconds for work in self.kernels)

    @property
    def traffic_s(self) -> float:
        """Time of the collectives alone [s]."""
        return sum(work.seconds for work in self.traffic)

    def duration_s(self, overlap_efficiency: float) -> float:
        """Return the time of both streams beside each other if nothing else is at work [s]."""
        kernels_s, traffic_s = self.kernels_s, self.traffic_s
        return kernels_s + traffic_s - overlap_efficiency * min(kernels_s, traffic_s)


Program = tuple[Segment, ...]


def piece_programs(
    job: TrainingJob,
    runtime: RuntimeProfile,
    config: ParallelConfig,
    groups: Groups,
    device: Device,
    *,
    prices: OperatorPrices,
    collective_time: CollectiveTime = collective_s,
) -> dict[tuple[int, Phase], Program]:
    """Return the program of every piece of the model in each pass; recomputed operators run in the backward pass.

    Args:
        job: Training job.
        runtime: Runtime profile; it says which collectives run beside which kernels.
        config: Configuration of the pass.
        groups: Groups of the configuration, one entry each.
        device: Device that runs the programs.
        prices: Prices of the configuration's operators.
        collective_time: Model of a collective's time.
    """
    builder = _Builder(job, runtime, config, groups, device, prices, collective_time)
    programs = {
        (at, phase): builder.piece(piece, phase) for at, piece in enumerate(job.model.pieces) for phase in Phase
    }
    return {
        key: tuple(segment for segment in program if segment.kernels or segment.traffic)
        for key, program in programs.items()
    }


def piece_launches(model: ModelSpec, prices: OperatorPrices, config: ParallelConfig) -> FloatArray:
    """Count the kernels and collectives that one micro-batch of each piece launches, both passes [2, P]."""
    return np.asarray(prices.launches(config) @ model.blocks_of_piece.T)


class _Builder:
    """Builder of programs, block by block."""

    def __init__(
        self,
        job: TrainingJob,
        runtime: RuntimeProfile,
        config: ParallelConfig,
        groups: Groups,
        device: Device,
        prices: OperatorPrices,
        collective_time: CollectiveTime,
    ) -> None:
        self.model, self.runtime, self.config = job.model, runtime, config
        grid = ConfigGrid.from_configs([config])
        self.sites = block_sites(job, runtime, grid)
        # A sharding plan scales the kernels and collectives of its shapes, and adds collectives of its own.
        self.change = change_of(runtime.layer_changes, grid)
        self.links = {part: link_between(getattr(groups, part)) for part in EXPOSED_PARTS}
        self.operators = prices.operators(config)
        self.core_names = frozenset(op.name for op in self.operators if op.is_core)
        self.recomputed = prices.recomputed(config)
        seconds = prices.seconds(config, device)
        self.kernels = {
            op.name: Work(name=op.name, kind=op.kind, part="compute", seconds=seconds[op.name]) for op in self.operators
        }
        self.collectives = {
            site: Work(
                name=site,
                kind=collective.kind,
                part=site.split(".")[0].removeprefix("expert_"),
                seconds=float(collective_time(collective)[0]),
                latency_s=float(collective_latency_s(collective)[0]),
                link=link_between(collective.group),
            )
            for site, collective in layer_collectives(job, runtime, grid, groups).items()
        }

    def piece(self, piece: Piece, phase: Phase) -> Program:
        """Return the program of a whole piece in one pass."""
        blocks = piece.blocks
        forward = [self._apply_plan(self._block(block, Phase.FORWARD), block, Phase.FORWARD) for block in blocks]
        if phase == Phase.FORWARD:
            return self._overlap_expert_exchanges(sum(forward, ()), blocks, passes=1)
        # The backward pass runs the blocks in the opposite order, after the recomputed part.
        again = self._repeat_forward(forward, blocks) if piece.is_layer else ()
        backward = [
            self._apply_plan(self._block(block, Phase.BACKWARD), block, Phase.BACKWARD) for block in reversed(blocks)
        ]
        passes = 2 if self._is_full else 1
        return self._overlap_expert_exchanges(again + sum(backward, ()), blocks, passes=passes)

    def _block(self, block: int, phase: Phase) -> Program:
        """Return the program of one block, as its family runs."""
        build = {
            Family.MIXER: self._mixer,
            Family.MLP: self._dense,
            Family.EXPERTS: self._moe,
            Family.TOWER: self._tower,
            Family.EMBEDDING: self._embedding,
            Family.HEAD: self._head,
        }
        return build[self.model.blocks[block].family](block, phase)

    def _tower(self, block: int, phase: Phase) -> Program:
        """Return a part of a tower, which every rank runs whole."""
        return (Segment(kernels=self._kernels_of(block, phase)),)

    def _embedding(self, block: int, phase: Phase) -> Program:
        """Return the lookup; its output is scattered over tp, and the output's gradient is gathered."""
        kernels = Segment(kernels=self._kernels_of(block, phase))
        if phase == Phase.FORWARD:
            return kernels, Segment(traffic=self._tensor_calls(scatters=1, reductions=1))
        return Segment(traffic=self._tensor_calls(gathers=1)), kernels

    def _head(self, block: int, phase: Phase) -> Program:
        """Return the last norm, the product with the vocabulary, and the loss.

        Forward the head gathers its input; backward it may do so again, and scatters the gradient of the input.
        """
        kernels = self._kernels_of(block, phase)
        if phase == Phase.BACKWARD:
            gathers = float(self.runtime.gathers_inputs_again)
            traffic = self._tensor_calls(gathers=gathers, scatters=1, reductions=1)
            return Segment(kernels=kernels), Segment(traffic=traffic)
        at = _first_product(kernels)
        return (
            Segment(kernels=kernels[:at]),
            Segment(traffic=self._tensor_calls(gathers=1)),
            Segment(kernels=kernels[at : at + 1]),
            Segment(traffic=self._calls("tp.softmax", 3)),
            Segment(kernels=kernels[at + 1 :]),
        )

    def _apply_plan(self, program: Program, block: int, phase: Phase) -> Program:
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
            for part, seconds in added_s(self.change, self.model.planned_names[block], phase).items()
            if seconds > 0
        )
        return (*self._scale_by_plan(program, block, phase), Segment(traffic=added))

    def _scale_by_plan(self, program: Program, block: int, phase: Phase) -> Program:
        change, name = self.change, self.model.planned_names[block]
        if change is None:
            return program
        return tuple(
            Segment(
                kernels=_scale(segment.kernels, compute_ratio(change, name, phase)),
                traffic=tuple(
                    scaled
                    for work in segment.traffic
                    for scaled in _scale((work,), exposed_ratio(change, name, work.part))
                    if scaled.seconds > 0
                ),
            )
            for segment in program
        )

    @property
    def _is_full(self) -> bool:
        return self.config.recompute == "full"

    def _repeat_forward(self, forward: Sequence[Program], blocks: Sequence[int]) -> Program:
        """Return the part that the backward pass runs again: whole layers with their collectives, or some operators."""
        in_layer = self.model.is_layer_block
        if self._is_full:
            return sum((program for program, block in zip(forward, blocks, strict=True) if in_layer[block]), ())
        return sum((self._scale_by_plan(self._select_recomputed(block), block, Phase.BACKWARD) for block in blocks), ())

    def _select_recomputed(self, block: int) -> Program:
        """Return the operators of a block that selective recomputation runs again."""
        kernels = tuple(
            replace(work, seconds=work.seconds * self.recomputed[work.name])
            for work in self._kernels_of(block, Phase.FORWARD)
            if work.name in self.recomputed
        )
        core = tuple(work for work in kernels if work.name in self.core_names)
        others = tuple(work for work in kernels if work not in core)
        return (*(self._exchange_around(block, core, Phase.FORWARD) if core else ()), Segment(kernels=others))

    def _mixer(self, block: int, phase: Phase) -> Program:
        """Return the program of a mixer: products, core with its exchanges, and products again."""
        kernels = self._kernels_of(block, phase)
        # The core's kernels are contiguous: they cut the block into the products before and behind them.
        core = [at for at, work in enumerate(kernels) if work.name in self.core_names]
        before, inside, after = kernels[: core[0]], kernels[core[0] : core[-1] + 1], kernels[core[-1] + 1 :]
        between = self._exchange_around(block, inside, phase)
        if phase == Phase.FORWARD:
            return self._gather_input(before) + between + self._scatter_output(after)
        return self._output_gradients(before) + between + self._input_gradients(after)

    def _exchange_around(self, block: int, core: tuple[Work, ...], phase: Phase) -> Program:
        """Return the core of a mixer with its exchanges: of heads, and around the ring."""
        own = self.sites[block]
        sent, dealt = own.exchanges.heads is not None, own.exchanges.dealt is not None
        traffic = self._calls(f"up.all_to_all{own.mixer}", sent) + self._calls(f"cp.all_to_all{own.mixer}", dealt)
        if own.exchanges.ring is None:
            return Segment(traffic=traffic), Segment(kernels=core)
        return Segment(traffic=traffic), *self._ring(core, phase, own.mixer)

    def _dense(self, block: int, phase: Phase) -> Program:
        """Return an MLP; its activation is the middle of the block, or its one product is both first and last."""
        kernels = self._kernels_of(block, phase)
        middle = next((at for at, work in enumerate(kernels) if ".activation" in work.name), len(kernels))
        first, last = kernels[:middle], kernels[middle:]
        if phase == Phase.FORWARD:
            return self._gather_input(first) + self._scatter_output(last)
        return self._output_gradients(first) + self._input_gradients(last)

    def _moe(self, block: int, phase: Phase) -> Program:
        """Return the experts' block.

        Tokens are exchanged and gathered before the experts' products, and both are undone after them.
        """
        kernels, own = self._kernels_of(block, phase), self.sites[block]
        is_expert = [work.kind == OpKind.GROUPED_MATMUL for work in kernels]
        start, end = is_expert.index(True), len(kernels) - is_expert[::-1].index(True)
        # An overlapped exchange is spread over the products of the whole layer later on.
        dispatch, combine = (self._calls(site) for site in self._exchange_sites(block))
        if self.runtime.overlaps_experts:
            dispatch = combine = ()
        shared = self._tensor_calls(gathers=1, scatters=1, reductions=1) if own.exchanges.tensor else ()
        return (
            Segment(kernels=kernels[:start]),
            Segment(traffic=dispatch + self._calls(f"expert_tp.all_gather{own.experts}")),
            Segment(kernels=kernels[start:end]),
            Segment(traffic=self._calls(f"expert_tp.reduce_scatter{own.experts}") + combine + shared),
            Segment(kernels=kernels[end:]),
        )

    def _gather_input(self, kernels: tuple[Work, ...]) -> Program:
        """Return the kernels up to a block's middle; the input is gathered for the first product."""
        at = _first_product(kernels)
        product = self._overlap(kernels[at : at + 1], self._tensor_calls(gathers=1))
        return (Segment(kernels=kernels[:at]), *product, Segment(kernels=kernels[at + 1 :]))

    def _scatter_output(self, kernels: tuple[Work, ...]) -> Program:
        """Return the kernels from a block's middle on; the output of the last product is scattered."""
        at = _last_product(kernels)
        # alone, the traffic follows the product
        product = self._overlap(kernels[at : at + 1], self._tensor_calls(scatters=1, reductions=1))[::-1]
        return (Segment(kernels=kernels[:at]), *product, Segment(kernels=kernels[at + 1 :]))

    def _output_gradients(self, kernels: tuple[Work, ...]) -> Program:
        """Return the kernels of the backward pass up to a block's middle; the output's gradient is gathered."""
        return self._overlap_gradients(kernels, self._tensor_calls(gathers=1))

    def _input_gradients(self, kernels: tuple[Work, ...]) -> Program:
        """Return the kernels of the backward pass from a block's middle on; the input's gradient is scattered.

        If the runtime gathers inputs again, the input is gathered for the gradients of its weights.
        """
        gathers = float(self.runtime.gathers_inputs_again)
        return self._overlap_gradients(kernels, self._tensor_calls(gathers=gathers, scatters=1, reductions=1))

    def _overlap_gradients(self, kernels: tuple[Work, ...], traffic: tuple[Work, ...]) -> Program:
        """Return kernels with the traffic beside all products of gradients, or beside those of the weights."""
        at, end = _first_product(kernels), _last_product(kernels) + 1
        products = kernels[at:end]
        beside = self._overlap(products, traffic)
        if self.runtime.overlaps_tensor_gradients and not self.runtime.overlaps_tensor:
            # Gradients of the inputs must be complete before they are scattered; those of the weights can run
            # meanwhile.
            of_weights = tuple(work for work in products if _is_weight_gradient(work))
            others = tuple(work for work in products if work not in of_weights)
            beside = (Segment(kernels=others), Segment(kernels=of_weights, traffic=traffic))
        return (Segment(kernels=kernels[:at]), *beside, Segment(kernels=kernels[end:]))

    def _overlap(self, kernels: tuple[Work, ...], traffic: tuple[Work, ...]) -> Program:
        """Return the traffic of tp beside kernels in one segment if they overlap, else before them."""
        if self.runtime.overlaps_tensor:
            return (Segment(kernels=kernels, traffic=traffic),)
        return (Segment(traffic=traffic), Segment(kernels=kernels))

    def _ring(self, core: tuple[Work, ...], phase: Phase, end: str) -> Program:
        """Return the attention core with the ring exchange of keys and values, backward of their gradients too.

        A hidden exchange still waits for each of its messages to begin.
        """
        cp, rounds = self.config.cp, 1 if phase == Phase.FORWARD else 2
        messages = rounds * (cp - 1)
        # Backward the ring carries gradients too, in fp32 if the runtime says so.
        if rounds == 2 and f"cp.gradients{end}" in self.collectives:
            exchanges = self._calls(f"cp.send_recv{end}", cp - 1) + self._calls(f"cp.gradients{end}", cp - 1)
        elif rounds == 2 and f"cp.joined{end}" in self.collectives:
            messages = cp
            exchanges = self._calls(f"cp.send_recv{end}", 2) + self._calls(f"cp.joined{end}", cp - 2)
        else:
            exchanges = self._calls(f"cp.send_recv{end}", rounds * (cp - 1))
        if not exchanges or not self.runtime.overlaps_ring:
            return Segment(traffic=exchanges), Segment(kernels=core)
        # The first of the cp steps works on local keys, so cp-1 steps can hide the exchange. A hidden exchange costs at
        # least the begin of its messages: the rest of that is appended.
        beside = Segment(kernels=_scale(core, (cp - 1) / cp), traffic=exchanges)
        exposed_s = beside.duration_s(self.runtime.overlap_efficiency) - beside.kernels_s
        begins = self._calls("cp.start", messages)
        begins_s = sum(work.seconds for work in begins)
        left = _scale(begins, (begins_s - exposed_s) / begins_s) if begins_s > exposed_s else ()
        return Segment(kernels=_scale(core, 1 / cp)), beside, Segment(traffic=left)

    def _overlap_expert_exchanges(self, program: Program, blocks: Sequence[int], passes: int) -> Program:
        """Return the program with the experts' exchanges spread over its products, if they overlap."""
        exchanges: tuple[Work, ...] = ()
        for block in blocks:
            if self.sites[block].exchanges.routed is not None:
                ratio = exposed_ratio(self.change, self.model.planned_names[block], "ep") if self.change else 1.0
                exchanges += tuple(
                    work for site in self._exchange_sites(block) for work in self._calls(site, passes * ratio)
                )
        if not self.runtime.overlaps_experts or not exchanges:
            return program
        products_s = sum(work.seconds for segment in program for work in segment.kernels if self._is_product(work))
        found: list[Segment] = []
        for segment in program:
            if not any(self._is_product(work) for work in segment.kernels):
                found.append(segment)
                continue
            # Each segment's products hide their share of the exchanges, by their duration.
            own_s = sum(work.seconds for work in segment.kernels if self._is_product(work))
            others = tuple(work for work in segment.kernels if not self._is_product(work))
            products = tuple(work for work in segment.kernels if self._is_product(work))
            traffic = segment.traffic + _scale(exchanges, own_s / products_s)
            found += [Segment(kernels=others), Segment(kernels=products, traffic=traffic)]
        return tuple(found)

    def _exchange_sites(self, block: int) -> tuple[str, str]:
        """Return the collectives that send tokens to their experts, and the results back."""
        end = self.sites[block].experts
        if self.runtime.gathers_tokens:
            return f"ep.all_gather{end}", f"ep.reduce_scatter{end}"
        return (f"ep.all_to_all{end}",) * 2

    def _is_product(self, work: Work) -> bool:
        return work.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL) and work.name not in self.core_names

    def _kernels_of(self, block: int, phase: Phase) -> tuple[Work, ...]:
        """Return the kernels of a block in one pass, in the order in which they run."""
        found = [op for op in self.operators if op.block == self.model.block_names[block]]
        names = [op.name for op in found if op.phase == Phase.FORWARD]
        if phase == Phase.FORWARD:
            return tuple(self.kernels[name] for name in names)

        def place(name: str) -> int:
            """Return the position of the forward operator whose gradient this is, by the longest common name."""
            return max(range(len(names)), key=lambda at: len(names[at]) if name.startswith(names[at]) else -1)

        # Gradients run in the opposite order of their forward operators.
        gradients = [op.name for op in found if op.phase == Phase.BACKWARD]
        return tuple(self.kernels[name] for name in sorted(gradients, key=lambda name: -place(name)))

    def _calls(self, site: str, times: float = 1.0) -> tuple[Work, ...]:
        """Return so many executions of a collective as one, or nothing if it takes no time."""
        one = self.collectives.get(site)
        return _scale((one,), times) if one is not None and times * one.seconds > 0 else ()

    def _tensor_calls(
        self, *, gathers: float = 0.0, scatters: float = 0.0, reductions: float = 0.0
    ) -> tuple[Work, ...]:
        """Return the collectives of tp: gathers and scatters under sequence parallelism, all-reduces without it."""
        if self.config.sequence_parallel:
            return self._calls("tp.all_gather", gathers) + self._calls("tp.reduce_scatter", scatters)
        return self._calls("tp.all_reduce", reductions)


def split_weight_gradients(program: Program) -> tuple[Program, Program]:
    """Return the program without the kernels that compute weights' gradients, and these kernels without its traffic."""
    others = tuple(
        replace(segment, kernels=tuple(work for work in segment.kernels if not _is_weight_gradient(work)))
        for segment in program
    )
    kernels = tuple(work for segment in program for work in segment.kernels if _is_weight_gradient(work))
    return others, (Segment(kernels=kernels),)


def _is_weight_gradient(work: Work) -> bool:
    return work.name.endswith("weight_gradient")


def link_between(group: GroupLinks) -> str:
    """Return the kind of links over which one group's ranks communicate."""
    if group.switches[0] > 1:
        return ACROSS
    return BETWEEN if group.domains[0] > 1 else INSIDE


def _scale(works: Sequence[Work], factor: float) -> tuple[Work, ...]:
    return tuple(replace(work, seconds=work.seconds * factor, latency_s=work.latency_s * factor) for work in works)


def _first_product(kernels: Sequence[Work]) -> int:
    """Return the position of the first matrix product, or the number of kernels if there is none."""
    return next((at for at, work in enumerate(kernels) if work.kind == OpKind.MATMUL), len(kernels))


def _last_product(kernels: Sequence[Work]) -> int:
    """Return the position of the last matrix product, or that of the last kernel if there is none."""
    return next((at for at in range(len(kernels) - 1, -1, -1) if kernels[at].kind == OpKind.MATMUL), len(kernels) - 1)
