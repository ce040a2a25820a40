"""What one block and micro-batch cost on each kind of device: kernels, exposed collectives, launches.

Letters: d kinds of devices, u unique shape rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, execution_s
from costmodels.operators.layer_operators import (
    BLOCKS,
    Block,
    Operator,
    OpKind,
    Phase,
    attention_core,
    is_core,
    is_recomputed,
    step_operators,
    unique_tokens,
)
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.changed_layers import LAYER_BLOCKS, shape_keys
from costmodels.step.communication import Beside, BlockCommunication, block_communication
from costmodels.step.placement import place, place_on
from hardware.arrays import FloatArray, IntArray
from hardware.device import Device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTimes:
    """Compute time of one block and micro-batch on one kind of device, each [len(BLOCKS), u].

    `backward` includes what recomputation runs again; `launches` counts operators of both passes. `products` are the
    matrix products of both passes, `weight_gradients` those that give the weights' gradients, `attention_core` the
    attention of both passes.
    """

    forward: FloatArray
    backward: FloatArray
    products: FloatArray
    weight_gradients: FloatArray
    attention_core: FloatArray
    launches: FloatArray


def block_times(
    job: TrainingJob, device: Device, runtime: RuntimeProfile, shapes: ConfigGrid, kernel_time: KernelTime
) -> BlockTimes:
    """Sums the operators of each block, for every shape row [u]."""
    tokens, token_of = unique_tokens(job, shapes)
    outside = [operator for operator in step_operators(job, runtime, tokens) if not is_core(operator)]
    both = (
        _summed(outside, job, device, runtime, tokens, kernel_time),
        _summed(attention_core(job, runtime, shapes), job, device, runtime, shapes, kernel_time),
    )
    sums = {f.name: [getattr(times, f.name) for times in both] for f in fields(BlockTimes)}
    return BlockTimes(**{name: rest[:, token_of] + core for name, (rest, core) in sums.items()})


def _summed(
    operators: Iterable[Operator],
    job: TrainingJob,
    device: Device,
    runtime: RuntimeProfile,
    shapes: ConfigGrid,
    kernel_time: KernelTime,
) -> BlockTimes:
    sums = BlockTimes(**{f.name: np.zeros((len(BLOCKS), len(shapes))) for f in fields(BlockTimes)})
    for operator in operators:
        block = BLOCKS.index(operator.block)
        seconds = execution_s(operator, device, job, runtime, shapes, kernel_time)
        if operator.phase == Phase.FORWARD:
            again = is_recomputed(job, operator, shapes)
            sums.forward[block] += seconds
            sums.backward[block] += np.where(again, seconds, 0.0)
            sums.launches[block] += 1.0 + again
        else:
            sums.backward[block] += seconds
            sums.launches[block] += 1.0
        if is_core(operator):
            sums.attention_core[block] += seconds
        elif operator.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL):
            sums.products[block] += seconds
        if operator.name.endswith("weight_gradient"):
            sums.weight_gradients[block] += seconds
    return sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCosts:
    """What one block and micro-batch cost, for every shape row [u].

    Attributes:
        compute: Seconds of the forward and the backward pass on each kind of device [d, 2, len(BLOCKS), u].
        exposed: Exposed seconds of EXPOSED_PARTS beside the compute of each kind of device [d, 4, len(BLOCKS), u].
        host: Seconds to launch the operators, and the number of collectives [2, len(BLOCKS), u].
        once_s: What collectives of weights take once a step beyond Megatron's plan; see layer_change.py
            [len(BLOCKS), u].
    """

    compute: FloatArray
    exposed: FloatArray
    host: FloatArray
    once_s: FloatArray

    def beside(self, again: BlockCosts) -> BlockCosts:
        """These, and then those of blocks that run again in full."""
        pairs = {f.name: (getattr(self, f.name), getattr(again, f.name)) for f in fields(self)}
        return BlockCosts(**{name: np.concatenate(pair, axis=-2) for name, pair in pairs.items()})

    def take(self, row: IntArray) -> BlockCosts:
        """The costs of configurations whose shapes are those rows."""
        return BlockCosts(**{f.name: getattr(self, f.name).take(row, axis=-1) for f in fields(self)})


def block_costs(
    setting: Setting,
    shapes: ConfigGrid,
    kernel_time: KernelTime,
    collective_time: CollectiveTime,
) -> BlockCosts:
    """The costs of every shape row; on unlike hosts, those of a kind of device are told on links of its own hosts."""
    cluster, runtime = setting.cluster, setting.runtime
    times = [block_times(setting.job, device, runtime, shapes, kernel_time) for device in cluster.devices]
    groups = [place(cluster, shapes)]
    if len(cluster.devices) > 1:
        groups = [place_on(cluster, device, shapes) for device in cluster.devices]
    found = [
        block_communication(setting.job, runtime, shapes, own, _beside(of_device), collective_time)
        for of_device, own in zip(times, groups, strict=True)
    ]
    issued = [found[0].collectives[block] for block in BLOCKS]
    costs = BlockCosts(
        compute=np.array([(t.forward, t.backward) for t in times]),
        exposed=np.array([_exposed_parts(communication) for communication in found]),
        host=np.array([times[0].launches * runtime.launch_s, issued]),
        once_s=np.zeros((len(BLOCKS), len(shapes))),
    )
    return _changed(costs, runtime, shapes)


def _changed(costs: BlockCosts, runtime: RuntimeProfile, shapes: ConfigGrid) -> BlockCosts:
    """The costs of shape rows [u] with what the runtime's plans change of some of them.

    What full recomputation runs again of a layer is its forward pass, and changed as that is.
    """
    known = {change.key: change for change in runtime.layer_changes}
    found = [(row, known[key]) for row, key in enumerate(shape_keys(shapes)) if key in known]
    if not found:
        return costs
    changed = {field.name: getattr(costs, field.name).copy() for field in fields(costs)}
    is_full = shapes.recompute == RECOMPUTE_MODES.index("full")
    in_layer = np.array([block in LAYER_BLOCKS for block in BLOCKS])
    for row, change in found:
        forward, backward = np.array(change.compute)
        again = in_layer * is_full[row]
        repeated = again * changed["compute"][:, 0, :, row]
        changed["compute"][:, 1, :, row] *= backward
        changed["compute"][:, 1, :, row] += (forward - backward) * repeated
        changed["compute"][:, 0, :, row] *= forward
        forward_s, backward_s = np.array(change.added_s) / runtime.network_efficiency
        changed["exposed"][..., row] *= np.array(change.exposed)
        changed["exposed"][..., row] += (1 + again) * forward_s + backward_s
        changed["once_s"][..., row] += np.array(change.once_s) / runtime.network_efficiency
    return replace(costs, **changed)


def _beside(times: BlockTimes) -> Beside:
    """The compute of one kind of device beside which communication may run."""
    return Beside(
        products=dict(zip(BLOCKS, times.products, strict=True)),
        weight_gradients=dict(zip(BLOCKS, times.weight_gradients, strict=True)),
        attention_core=times.attention_core.sum(axis=0),
    )


def _exposed_parts(found: BlockCommunication) -> list[list[FloatArray]]:
    """What blocks expose of EXPOSED_PARTS [4, len(BLOCKS), u]."""
    by_block: dict[str, dict[Block, FloatArray]] = {
        "tp": found.tp,
        "cp": {Block.ATTENTION: found.cp},
        "up": {Block.ATTENTION: found.up},
        "ep": {Block.MOE_MLP: found.ep},
    }
    none = np.zeros_like(found.cp)
    return [[by_block[part].get(block, none) for block in BLOCKS] for part in EXPOSED_PARTS]
