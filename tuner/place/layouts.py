"""Layouts of one unit on one set of devices: their times and memory, of which only the useful ones are kept.

Training is priced by the closed form of the step (`costmodels.step`). A forward pass is the forward part of the same
formula: m micro-batches on the slowest stage, and one on each other stage to fill the pipeline, with a transfer before
each. Memory of a forward pass is the weights, twice one layer's activations, and the logits.

Letters: n configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.operator import Phase
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.block_costs import block_costs
from costmodels.step.memory.activations import layer_activations
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.pipeline.stage_pricing import StagePricing
from costmodels.step.pipeline.transfers import hop_collectives, transfer_collectives
from costmodels.step.placement import pipelines, place
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from tuner.place.workload import TRAIN, Module
from tuner.space.dimensions import SEARCHED
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for

SEARCHED_VALUES = {"up": (1,), "cp": (1, 2, 4), "vpp": (1, 2), "mbs": (1, 2, 4)}
"""Values of dimensions that are searched in part, to keep a placement's search short (assumed)."""

MOST_LAYOUTS = 5
"""Most layouts of a module on one set of devices that the search chooses from."""

LEAST_SAVING = 0.93
"""Share of the memory of all faster layouts below which a slower layout is kept."""

SLOWEST = 3.0
"""Multiple of the fastest layout's time up to which slower ones are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A way to run the modules of one unit on one set of devices.

    Attributes:
        config: Degrees.
        times_s: Time of each module of the unit in a step, in their order [s].
        state_bytes: Memory of a device that the unit takes while others run: weights, and what training keeps.
        weight_bytes: Weights of a device.
        moved_bytes: What training must keep on the host if it is not on the device; weights alone if nothing trains.
        busy_bytes: Memory of a device while the unit runs, states included.
        activation_bytes: Memory of one micro-batch in flight.
        micro_batches: Micro-batches in which a step passes through the unit.
        parts: Devices that share one copy of the weights.
        concurrency: Sequences that each replica of a generator decodes at once; 0 for others.
        phases: Names of phases of the only module, and their times [s].
    """

    config: ParallelConfig
    times_s: tuple[float, ...]
    state_bytes: float
    weight_bytes: float
    moved_bytes: float
    busy_bytes: float
    activation_bytes: float = 0.0
    micro_batches: int = 1
    parts: int = 1
    concurrency: int = 0
    phases: tuple[tuple[str, float], ...] = ()


def space_options(modules: tuple[Module, ...], headroom: float) -> SpaceOptions:
    """Return the options of the space of layouts; degrees that the file fixes have that value alone."""
    allowed = dict(SEARCHED_VALUES) | {name: (value,) for module in modules for name, value in module.layout}
    opened: tuple[str, ...] = ()
    recompute = SEARCHED["recompute"].offered
    if modules[0].job == TRAIN and recompute is not None and len(recompute(modules[0].runtime)) > 1:
        opened = ("recompute",)
    codes = tuple((name, values) for name, values in allowed.items())
    return SpaceOptions(allowed=codes, opened=opened, memory_headroom=headroom)


def layouts_of(modules: tuple[Module, ...], cluster: Cluster, headroom: float) -> tuple[Layout, ...]:
    """Return the useful layouts of a unit on a cluster, the fastest first; none if it does not fit.

    Args:
        modules: Modules of the unit, of which the first owns the weights; none generates.
        cluster: Devices that the unit occupies.
        headroom: Share of memory that must stay free.
    """
    first = modules[0]
    options = space_options(modules, headroom)
    setting = setting_for(first.training, cluster, first.runtime, options)
    try:
        grid, _ = enumerate_space(setting, options)
    except ConfigError:
        return ()  # the set of devices has more layouts than can be enumerated
    for other in modules[1:]:
        grid = grid.take(other.training.global_batch_size % (grid.dp * grid.mbs) == 0)
    if not len(grid):
        return ()
    if first.job == TRAIN:
        return _training_layouts(modules, setting, grid, headroom)
    return _forward_layouts(modules, setting, grid, headroom)


def _training_layouts(
    modules: tuple[Module, ...], setting: Setting, grid: ConfigGrid, headroom: float
) -> tuple[Layout, ...]:
    memory = estimate_memory(setting, grid)
    fitting = np.flatnonzero(memory.fits(headroom))
    if not len(fitting):
        return ()
    grid, memory = grid.take(fitting), memory.take(fitting)
    times = [modules[0].optimizer_steps * estimate_step(setting, grid, memory=memory).step_time_s]
    times += [_forward_s(other, setting, grid) for other in modules[1:]]
    parts = memory.parts_bytes
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    micro_batches = setting.job.global_batch_size // (grid.dp * grid.mbs)
    kept = _useful(np.sum(times, axis=0), memory.needed_bytes, state, micro_batches)
    return tuple(
        Layout(
            config=grid.config(at),
            times_s=tuple(float(seconds[at]) for seconds in times),
            state_bytes=float(state[at]),
            weight_bytes=float(parts["weights"][at]),
            moved_bytes=float(parts["weights"][at] + parts["optimizer"][at]),
            busy_bytes=float(memory.needed_bytes[at]),
            activation_bytes=float(parts["activations"][at]) / max(int(grid.pp[at]), 1),
            micro_batches=int(micro_batches[at]) * modules[0].optimizer_steps,
            parts=int(grid.tp[at] * grid.pp[at]),
        )
        for at in kept
    )


def _forward_layouts(
    modules: tuple[Module, ...], setting: Setting, grid: ConfigGrid, headroom: float
) -> tuple[Layout, ...]:
    grid = grid.take(grid.vpp == 1)
    weights, busy, memory = forward_memory(setting, grid)
    fitting = np.flatnonzero(busy <= (1 - headroom) * memory.capacity_bytes)
    grid, weights, busy = grid.take(fitting), weights[fitting], busy[fitting]
    if not len(grid):
        return ()
    times = [_forward_s(module, setting, grid) for module in modules]
    micro_batches = setting.job.global_batch_size // (grid.dp * grid.mbs)
    kept = _useful(np.sum(times, axis=0), busy, weights, micro_batches)
    return tuple(
        Layout(
            config=grid.config(at),
            times_s=tuple(float(seconds[at]) for seconds in times),
            state_bytes=float(weights[at]),
            weight_bytes=float(weights[at]),
            moved_bytes=float(weights[at]),
            busy_bytes=float(busy[at]),
            micro_batches=int(micro_batches[at]),
            parts=int(grid.tp[at] * grid.pp[at]),
        )
        for at in kept
    )


def forward_memory(setting: Setting, grid: ConfigGrid) -> tuple[FloatArray, FloatArray, MemoryEstimate]:
    """Return the weights and the whole memory of a forward pass [bytes], both [n], and the estimate of training."""
    memory = estimate_memory(setting, grid)
    parts = memory.parts_bytes
    shapes, shape_of = unique_shapes(grid)
    layer = layer_activations(setting.job, setting.runtime, shapes)
    of_layer = layer.kept.max(axis=0).take(shape_of)
    return parts["weights"], parts["weights"] + 2 * of_layer + parts["logits"] + parts["overhead"], memory


def _forward_s(module: Module, setting: Setting, grid: ConfigGrid) -> FloatArray:
    """Return the time of the forward pass of one module's whole batch [s], [n]."""
    job = replace(module.training, recompute=RECOMPUTE_MODES[0])
    count = job.global_batch_size // (grid.dp * grid.mbs)
    return forward_pass_s(replace(setting, job=job), _without_recomputation(grid), count)


def _without_recomputation(grid: ConfigGrid) -> ConfigGrid:
    return replace(grid, recompute=np.zeros_like(grid.recompute), vpp=np.ones_like(grid.vpp))


def forward_pass_s(setting: Setting, grid: ConfigGrid, num_micro_batches: IntArray) -> FloatArray:
    """Return the time of a forward pass of some micro-batches through each pipeline [s], [n].

    The configurations recompute nothing and have one chunk per stage.
    """
    shapes, shape_of = unique_shapes(grid)
    costs = block_costs(setting, shapes, kernel_s, collective_s)
    layouts = pipelines(setting, grid)
    groups = place(setting.cluster, layouts.weights)
    total_s = np.zeros(len(grid))
    for pipeline in layouts.each:
        at = pipeline.at
        pricing = StagePricing(setting, pipeline, groups.take(pipeline.weights_at), collective_s)
        forward_s = pricing.times(costs.take(shape_of[at]), grid.vpp[at]).forward_s
        filling_s = pipeline.stages.count @ forward_s
        total_s[at] = (num_micro_batches[at] - 1) * forward_s.max(axis=0) + filling_s
    of_each = groups.take(layouts.weights_of)
    collectives = transfer_collectives(setting.job, setting.runtime, grid, of_each)
    sent = hop_collectives(setting.runtime, grid, Phase.FORWARD)
    hop_s = np.sum([number * collective_s(collectives[name]) for name, number in sent], axis=0)
    return np.asarray(total_s + np.where(grid.pp > 1, hop_s * (num_micro_batches + grid.pp - 2), 0.0))


def _useful(seconds: FloatArray, busy: FloatArray, state: FloatArray, micro_batches: IntArray) -> list[int]:
    """Return the positions of layouts that are no slower than others of their memory, the fastest first.

    A slower layout is kept if it needs clearly less memory, or passes more micro-batches, than all faster ones.
    """
    order = np.argsort(seconds, kind="stable")
    kept: list[int] = []
    for at in order.tolist():
        if seconds[at] > SLOWEST * seconds[order[0]] or len(kept) == MOST_LAYOUTS:
            break
        if (
            not kept
            or busy[at] < LEAST_SAVING * min(busy[one] for one in kept)
            or state[at] < LEAST_SAVING * min(state[one] for one in kept)
            or micro_batches[at] >= 2 * max(micro_batches[one] for one in kept)
        ):
            kept.append(at)
    return kept
