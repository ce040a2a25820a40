"""Communication inside the layers: time of one micro-batch that tp, cp, up and ep expose, per block.

Sources: tensor parallelism has two all-reduces per layer and pass (Shoeybi et al. 2019, section 3), each a
reduce-scatter and an all-gather under sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Ring attention
passes keys and values cp-1 times, and on the way back their gradients too (Liu et al. 2023, section 3). Ulysses
exchanges q, k, v and the output all to all (Jacobs et al. 2023, section 3.2). Experts dispatch and combine tokens all
to all (GShard, Lepikhin et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.blocks.contract import Exchanges
from costmodels.blocks.operator import Family, OpKind, Phase
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, collective_s
from costmodels.operators.layer_operators import (
    Collective,
    block_context,
    core_recomputed,
    local_tokens,
    residual_tokens,
)
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.launches import captures_block
from costmodels.step.placement import Groups
from hardware.arrays import FloatArray
from hardware.group_links import GroupLinks

ISSUED = {"up.all_to_all": 4.0}
"""Number of collectives that the host issues for one collective of this model: queries, keys, values and the output are
exchanged one by one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerUse:
    """Number of times that one micro-batch executes a collective for one block, in one pass.

    Attributes:
        site: Name of the collective.
        block: Position of the block that executes the collective in `ModelSpec.blocks`.
        phase: Forward or backward pass. Forward collectives that recomputation repeats count as forward again.
        count: Number of executions [n].
    """

    site: str
    block: int
    phase: Phase
    count: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCommunication:
    """Communication time of one micro-batch [s], both passes and recomputation together; B blocks of the model.

    Attributes:
        exposed: Exposed time by EXPOSED_PARTS and block [4, B, n].
        hidden: Further time of the collectives of tp and ep, beside compute, by EXPOSED_PARTS and block [4, B, n].
        collectives: Number of collectives that the host issues per block [B, n].
    """

    exposed: FloatArray
    hidden: FloatArray
    collectives: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beside:
    """Compute time of blocks and one micro-batch beside which communication may run [s], each array [B, n].

    Attributes:
        products: Time of the matrix products of both passes.
        weight_gradients: Time of the products that compute the weights' gradients.
        core: Time of the core of a mixer in both passes.
    """

    products: FloatArray
    weight_gradients: FloatArray
    core: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockSites:
    """Exchanges of one block, and the ends of the names of its collectives.

    Attributes:
        exchanges: What the block's ranks exchange.
        mixer: End of the names of the collectives of cp and up; empty for the model's first mixer, and for others that
            send as much.
        experts: End of the names of the collectives of experts.
    """

    exchanges: Exchanges
    mixer: str
    experts: str


def block_sites(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> tuple[BlockSites, ...]:
    """Return the exchanges of every block [B], for every configuration [n]."""
    context, model = block_context(job, runtime, grid), job.model
    every = [block.exchanges(context) for block in model.blocks]
    mixer = _name_unlike([(own.ring, own.heads) for own in every], model.block_names)
    experts = _name_unlike([(own.routed,) for own in every], model.block_names)
    return tuple(BlockSites(exchanges=own, mixer=a, experts=b) for own, a, b in zip(every, mixer, experts, strict=True))


def _name_unlike(values: Sequence[tuple[FloatArray | None, ...]], names: Sequence[str]) -> list[str]:
    """Return an end of names for every block: empty for the first values that are there, and for equal ones."""
    known: list[tuple[tuple[FloatArray | None, ...], str]] = []
    found = []
    for own, name in zip(values, names, strict=True):
        if all(value is None for value in own):
            found.append("")
            continue
        same = next((end for other, end in known if _are_equal(own, other)), None)
        if same is None:
            same = f".{name}" if known else ""
            known.append((own, same))
        found.append(same)
    return found


def _are_equal(one: tuple[FloatArray | None, ...], other: tuple[FloatArray | None, ...]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else np.array_equal(a, b) for a, b in pairs)


def exposed_s(runtime: RuntimeProfile, seconds: FloatArray, beside: FloatArray | float) -> FloatArray:
    """Return the cost of communication of `seconds` that runs beside compute of `beside` seconds [n].

    A share of the hidden time is paid all the same, because kernels that share the device slow each other down.
    """
    return np.asarray(seconds - runtime.overlap_efficiency * np.minimum(seconds, beside))


def layer_collectives(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups
) -> dict[str, Collective]:
    """Return every collective that layers may call, by its name, for every configuration [n]."""
    efficiency = runtime.network_efficiency
    width = job.element_bytes / efficiency
    tokens = local_tokens(job, grid)
    found: dict[str, Collective] = {}

    def add(name: str, kind: OpKind, wire_bytes: FloatArray, group: GroupLinks) -> None:
        found[name] = Collective(
            name=name, kind=kind, wire_bytes=wire_bytes, network_efficiency=efficiency, group=group
        )

    # Messages are divided by the network's efficiency: fewer useful bytes per second are as slow as more bytes.
    hidden = width * tokens * job.model.hidden_size
    add("tp.all_gather", OpKind.ALL_GATHER, hidden, groups.tp)
    add("tp.reduce_scatter", OpKind.REDUCE_SCATTER, hidden, groups.tp)
    add("tp.all_reduce", OpKind.ALL_REDUCE, hidden, groups.tp)
    # The softmax over a split vocabulary reduces three fp32 numbers per token.
    add("tp.softmax", OpKind.ALL_REDUCE, 4 * tokens / efficiency, groups.tp)
    for own in block_sites(job, runtime, grid):
        moved, end = own.exchanges, own.experts
        if moved.routed is not None and f"expert_tp.all_gather{end}" not in found:
            # Experts with a tensor degree of their own gather the routed tokens before their products and scatter the
            # results. The all-to-all exchange moves top_k copies of every token instead.
            gathered = width * moved.routed * moved.routed_width
            add(f"expert_tp.all_gather{end}", OpKind.ALL_GATHER, gathered, groups.expert_tp)
            add(f"expert_tp.reduce_scatter{end}", OpKind.REDUCE_SCATTER, gathered, groups.expert_tp)
            own_bytes = width * residual_tokens(job, grid) * moved.routed_width
            if runtime.gathers_tokens:
                # all ranks gather the tokens of the group, and sum up what their experts made of them (megatron-core
                # moe/token_dispatcher.py, MoEAllGatherTokenDispatcher)
                add(f"ep.all_gather{end}", OpKind.ALL_GATHER, grid.ep * own_bytes, groups.ep)
                add(f"ep.reduce_scatter{end}", OpKind.REDUCE_SCATTER, grid.ep * own_bytes, groups.ep)
            else:
                dispatched = own_bytes * moved.visits
                if runtime.deduplicates_tokens:
                    dispatched = dispatched * _distinct_share(moved.visits, groups.ep)
                uneven = (1 + runtime.expert_imbalance) * dispatched
                add(f"ep.all_to_all{end}", OpKind.ALL_TO_ALL, uneven, groups.ep)
        end = own.mixer
        if moved.ring is not None and f"cp.send_recv{end}" not in found:
            # One hop of the ring carries the keys and the values of a rank's share of the sequence.
            block = moved.ring / efficiency
            add(f"cp.send_recv{end}", OpKind.SEND_RECV, job.element_bytes * block, groups.cp)
            # Some runtimes accumulate the gradients of keys and values in fp32 on their way round the ring.
            if runtime.fp32_ring_gradients:
                add(f"cp.gradients{end}", OpKind.SEND_RECV, 4 * block, groups.cp)
            elif runtime.joins_ring:
                add(f"cp.joined{end}", OpKind.SEND_RECV, 2 * job.element_bytes * block, groups.cp)
        if moved.heads is not None and f"up.all_to_all{end}" not in found:
            exchanged = job.element_bytes * moved.heads / efficiency
            add(f"up.all_to_all{end}", OpKind.ALL_TO_ALL, exchanged, groups.up)
        if moved.dealt is not None and f"cp.all_to_all{end}" not in found:
            dealt = job.element_bytes * moved.dealt / efficiency
            add(f"cp.all_to_all{end}", OpKind.ALL_TO_ALL, dealt, groups.cp)
    if runtime.overlaps_ring:
        add("cp.start", OpKind.SEND_RECV, np.zeros(1), groups.cp)
    return found


def layer_uses(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> tuple[LayerUse, ...]:
    """Count the executions of the layers' collectives by one micro-batch, for every configuration [n].

    Nothing is hidden here. `cp.start` is no execution of its own: it is the remaining cost of a hidden exchange.
    """
    none, once = np.zeros(len(grid)), np.ones(len(grid))
    again = once + (grid.recompute == RECOMPUTE_MODES.index("full"))
    core_again = once + core_recomputed(job, runtime, grid)
    split = grid.sequence_parallel.astype(np.float64)
    whole = 1.0 - split
    # Sequence parallelism replaces every all-reduce by an all-gather and a reduce-scatter; `split` is 1 where it is on.
    ring = grid.cp - once
    uses: list[LayerUse] = []

    def add(block: int, phase: Phase, counts: Mapping[str, FloatArray], end: str = "") -> None:
        uses.extend(
            LayerUse(site=f"{site}{end}", block=block, phase=phase, count=count) for site, count in counts.items()
        )

    def tensor(gathers: FloatArray, scatters: FloatArray, reductions: FloatArray) -> dict[str, FloatArray]:
        return {
            "tp.all_gather": gathers * split,
            "tp.reduce_scatter": scatters * split,
            "tp.all_reduce": reductions * whole,
        }

    # Mixers and MLPs each gather their input and scatter their output once per pass, and do so again where full
    # recomputation repeats the forward pass. The embedding and the head have one side only.
    gathers_again = (1 + runtime.gathers_inputs_again) * once
    # On the way back the ring passes the keys and values and their gradients.
    passed = {"cp.send_recv": ring, "cp.gradients": ring} if runtime.fp32_ring_gradients else {"cp.send_recv": 2 * ring}
    if runtime.joins_ring:
        passed = {"cp.send_recv": np.minimum(2 * ring, 2.0), "cp.joined": np.maximum(ring - 1, 0.0)}
    for at, own in enumerate(block_sites(job, runtime, grid)):
        family, moved = job.model.blocks[at].family, own.exchanges
        if family is Family.EMBEDDING:
            add(at, Phase.FORWARD, tensor(none, once, once))
            add(at, Phase.BACKWARD, tensor(once, none, none))
        elif family is Family.HEAD:
            add(at, Phase.FORWARD, tensor(once, none, none) | {"tp.softmax": 3 * once})
            add(at, Phase.BACKWARD, tensor(gathers_again - once, once, once))
        elif moved.routed is not None:
            for phase, passes in ((Phase.FORWARD, again), (Phase.BACKWARD, once)):
                experts = {"expert_tp.all_gather": passes, "expert_tp.reduce_scatter": passes}
                experts |= {site: count * passes for site, count in expert_exchanges(runtime).items()}
                add(at, phase, experts, own.experts)
                add(at, phase, tensor(passes, passes, passes) if moved.tensor else {})
        elif moved.tensor:
            add(at, Phase.FORWARD, tensor(again, again, again))
            add(at, Phase.BACKWARD, tensor(gathers_again, once, once))
        if moved.ring is not None:
            add(at, Phase.FORWARD, {"cp.send_recv": core_again * ring}, own.mixer)
            add(at, Phase.BACKWARD, passed, own.mixer)
        for site, sent in (("up.all_to_all", moved.heads), ("cp.all_to_all", moved.dealt)):
            if sent is not None:
                add(at, Phase.FORWARD, {site: core_again}, own.mixer)
                add(at, Phase.BACKWARD, {site: once}, own.mixer)
    return tuple(uses)


def expert_exchanges(runtime: RuntimeProfile) -> dict[str, int]:
    """Return the collectives of one pass through the experts of a layer: dispatch and combine."""
    return {"ep.all_gather": 1, "ep.reduce_scatter": 1} if runtime.gathers_tokens else {"ep.all_to_all": 2}


def block_communication(
    job: TrainingJob,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    groups: Groups,
    beside: Beside,
    collective_time: CollectiveTime = collective_s,
) -> BlockCommunication:
    """Compute the exposed communication of every configuration [n]."""
    collectives = layer_collectives(job, runtime, grid, groups)
    alone_s = {site: collective_time(collective) for site, collective in collectives.items()}
    forward_passes = 1.0 + (grid.recompute == RECOMPUTE_MODES.index("full"))
    # Passes of a layer: the forward pass, its repetition under full recomputation, and the backward pass.
    passes = forward_passes + 1.0
    core_passes = np.where(core_recomputed(job, runtime, grid), 3.0, 2.0)
    # Tensor parallelism communicates once per pass in each block. Megatron-LM gathers the inputs again in the backward
    # pass instead of keeping them.
    gather_scatter = alone_s["tp.all_gather"] + alone_s["tp.reduce_scatter"]
    per_pass = np.where(grid.sequence_parallel, gather_scatter, alone_s["tp.all_reduce"])
    gathers_again = grid.sequence_parallel & runtime.gathers_inputs_again
    backward = per_pass + np.where(gathers_again, alone_s["tp.all_gather"], 0.0)

    tensor_s = forward_passes * per_pass + backward

    # A runtime hides all traffic beside the products, or only the backward traffic beside weight gradients, or nothing.
    def exposed_tensor_s(block: int) -> FloatArray:
        if runtime.overlaps_tensor:
            return exposed_s(runtime, tensor_s, beside.products[block])
        if runtime.overlaps_tensor_gradients:
            exposed = exposed_s(runtime, backward, beside.weight_gradients[block])
            return np.asarray(forward_passes * per_pass + exposed)
        return np.asarray(tensor_s)

    model, number = job.model, len(grid)
    exposed = np.zeros((len(EXPOSED_PARTS), len(model.blocks), number))
    hidden = np.zeros_like(exposed)
    tp, cp, up, ep = (EXPOSED_PARTS.index(part) for part in ("tp", "cp", "up", "ep"))
    for at, own in enumerate(block_sites(job, runtime, grid)):
        family, moved = model.blocks[at].family, own.exchanges
        if family is Family.EMBEDDING:
            exposed[tp, at] = per_pass
        elif family is Family.HEAD:  # it gathers its input, perhaps once more, and scatters that gradient
            exposed[tp, at] = backward + 3 * alone_s["tp.softmax"]
        elif moved.routed is not None:
            # Experts gather and scatter in every pass; shared experts communicate like a dense MLP in addition.
            experts = alone_s[f"expert_tp.all_gather{own.experts}"] + alone_s[f"expert_tp.reduce_scatter{own.experts}"]
            exposed[tp, at] = passes * (experts + (per_pass if moved.tensor else 0.0))
            exchanged_s = passes * sum(
                count * alone_s[f"{site}{own.experts}"] for site, count in expert_exchanges(runtime).items()
            )
            exposed[ep, at] = exchanged_s
            if runtime.overlaps_experts:
                around = np.tensordot(model.mixers_beside[at], beside.products, axes=1)
                exposed[ep, at] = exposed_s(runtime, exchanged_s, beside.products[at] + around)
            hidden[ep, at] = exchanged_s - exposed[ep, at]
        elif moved.tensor:
            exposed[tp, at] = exposed_tensor_s(at)
            hidden[tp, at] = tensor_s - exposed[tp, at]
        if moved.ring is not None:
            exposed[cp, at] = _ring_s(runtime, grid, alone_s, own.mixer, beside.core[at], core_passes)
        if moved.heads is not None:
            exposed[up, at] = core_passes * alone_s[f"up.all_to_all{own.mixer}"]
        if moved.dealt is not None:
            exposed[cp, at] = core_passes * alone_s[f"cp.all_to_all{own.mixer}"]
    return BlockCommunication(exposed=exposed, hidden=hidden, collectives=issued_collectives(job, runtime, grid))


def _distinct_share(top_k: float, group: GroupLinks) -> FloatArray:
    """Return the share of a token's top_k copies that leave it if each host, or each rank of one host, gets one [n].

    For experts drawn at random, H (1 - (1 - 1/H)^k) of H places are hit (DeepEP's dispatch sends to a host once and
    forwards inside it; DeepSeek-V3, arXiv 2412.19437, section 3.2.2).
    """
    places = np.where(group.domains > 1, group.domains, group.size).astype(np.float64)
    return np.asarray(places * (1 - (1 - 1 / places) ** top_k) / top_k)


def issued_collectives(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> FloatArray:
    """Count the collectives that one micro-batch issues per block [B, n], both passes and recomputation together."""
    is_split = {
        "tp": grid.tp > 1,
        "expert_tp": grid.expert_tensor > 1,
        "ep": grid.ep > 1,
        "cp": grid.cp > 1,
        "up": grid.up > 1,
    }
    issued, model = np.zeros((len(job.model.blocks), len(grid))), job.model
    for use in layer_uses(job, runtime, grid):
        if captures_block(runtime, model.blocks[use.block].family):
            continue
        part, role, *_ = use.site.split(".")
        issued[use.block] += use.count * ISSUED.get(f"{part}.{role}", 1.0) * is_split[part]
    return issued


def _ring_s(
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    alone_s: Mapping[str, FloatArray],
    end: str,
    core_s: FloatArray,
    passes: FloatArray,
) -> FloatArray:
    """Compute the exposed ring exchanges of one attention block [s], [n].

    Keys and values go round forward, and with their gradients backward.

    In one exchange every member's share visits all members, in cp-1 steps that wait for the slowest hop (Liu et al.
    2023).
    """
    # The blocks go round once forward (again if recomputed). Backward, the blocks and their gradients go round.
    forward_s = alone_s[f"cp.send_recv{end}"]
    gradients_s = alone_s.get(f"cp.gradients{end}", forward_s)
    exchanges = (grid.cp - 1) * (passes * forward_s + gradients_s)
    messages = (passes + 1) * (grid.cp - 1)
    if runtime.joins_ring:  # the first message back has no gradients yet, and the last one nothing else
        joined = np.maximum(grid.cp - 2, 0)
        exchanges = exchanges + joined * (alone_s[f"cp.joined{end}"] - 2 * forward_s)
        messages = messages - joined
    if not runtime.overlaps_ring:
        return np.asarray(exchanges)
    # The first of the cp steps works on local keys. The other cp-1 steps can hide an exchange, but each waits for the
    # one before.
    latency = messages * alone_s["cp.start"]
    return np.maximum(exposed_s(runtime, exchanges, core_s * (grid.cp - 1) / grid.cp), latency)
