"""Costs of one block and micro-batch on each kind of device: kernels, exposed collectives and launches.

Letters: d kinds of devices, u unique shape rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    recomputed_share,
    step_operators,
    unique_tokens,
)
from costmodels.step.breakdown import EXPOSED_PARTS
from costmodels.step.changed_layers import LAYER_BLOCKS, change_keys
from costmodels.step.communication import Beside, BlockCommunication, block_communication
from costmodels.step.launches import is_launched
from costmodels.step.placement import place, place_on
from hardware.arrays import FloatArray, IntArray
from hardware.device import Device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTimes:
    """Compute time of one block and micro-batch on one kind of device [s], each array [len(BLOCKS), u].

    Attributes:
        forward: Time of the forward pass.
        backward: Time of the backward pass, including everything that recomputation runs again.
        products: Time of the matrix products of both passes.
        weight_gradients: Time of the products that compute the weights' gradients.
        attention_core: Time of the attention core in both passes.
        launches: Number of operators that both passes launch.
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
    """Sum the times of the operators of each block, for every shape row [u]."""
    # Outside the attention core, mbs, cp and up matter only through a rank's number of tokens, so those operators are
    # priced once per distinct number.
    tokens, token_of = unique_tokens(job, shapes)
    outside = [operator for operator in step_operators(job, runtime, tokens) if not is_core(operator)]
    both = (
        _sum_by_block(outside, job, device, runtime, tokens, kernel_time),
        _sum_by_block(attention_core(job, runtime, shapes), job, device, runtime, shapes, kernel_time),
    )
    sums = {f.name: [getattr(times, f.name) for times in both] for f in fields(BlockTimes)}
    return BlockTimes(**{name: rest[:, token_of] + core for name, (rest, core) in sums.items()})


def _sum_by_block(
    operators: Iterable[Operator],
    job: TrainingJob,
    device: Device,
    runtime: RuntimeProfile,
    shapes: ConfigGrid,
    kernel_time: KernelTime,
) -> BlockTimes:
    """Add up the operators by block and by the use that later terms make of them."""
    # Tensor parallelism may run beside all products or beside those of weight gradients alone, the ring beside the
    # attention core. Therefore these times are summed apart as well.
    sums = BlockTimes(**{f.name: np.zeros((len(BLOCKS), len(shapes))) for f in fields(BlockTimes)})
    for operator in operators:
        block = BLOCKS.index(operator.block)
        seconds = execution_s(operator, device, job, runtime, shapes, kernel_time)
        runs = (operator.moved_bytes > 0) & is_launched(runtime, operator)
        if operator.phase == Phase.FORWARD:
            # A recomputed operator runs in the forward pass and once more in the backward pass.
            again = recomputed_share(job, runtime, operator, shapes)
            sums.forward[block] += seconds
            sums.backward[block] += again * seconds
            sums.launches[block] += runs * (1.0 + again)
        else:
            sums.backward[block] += seconds
            sums.launches[block] += runs
        if is_core(operator):
            sums.attention_core[block] += seconds
        elif operator.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL):
            sums.products[block] += seconds
        if operator.name.endswith("weight_gradient"):
            sums.weight_gradients[block] += seconds
    return sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCosts:
    """Costs of one block and micro-batch, for every shape row [u].

    Attributes:
        compute: Time of the forward and the backward pass on each kind of device [s], [d, 2, len(BLOCKS), u].
        core: Part of both passes that the attention core takes [s], [d, 1, len(BLOCKS), u].
        exposed: Exposed time of EXPOSED_PARTS beside the compute of each kind of device [s], [d, 4, len(BLOCKS), u].
        hidden: Further time of the collectives of tp and ep, beside compute [s], [d, 4, len(BLOCKS), u]; the ring's is
            not counted.
        host: Time to launch the operators [s], and the number of collectives, [2, len(BLOCKS), u].
        once_s: Time of weight collectives that a sharding plan adds to Megatron's plan once per step [s], [len(BLOCKS),
            u]; see layer_change.py.
    """

    compute: FloatArray
    core: FloatArray
    exposed: FloatArray
    hidden: FloatArray
    host: FloatArray
    once_s: FloatArray

    def beside(self, again: BlockCosts) -> BlockCosts:
        """Append the costs of blocks that run again in full as further rows of the block axis."""
        pairs = {f.name: (getattr(self, f.name), getattr(again, f.name)) for f in fields(self)}
        return BlockCosts(**{name: np.concatenate(pair, axis=-2) for name, pair in pairs.items()})

    def take(self, row: IntArray) -> BlockCosts:
        """Select the costs of configurations by their shape rows."""
        return BlockCosts(**{f.name: getattr(self, f.name).take(row, axis=-1) for f in fields(self)})


def shape_costs(
    setting: Setting, shapes: ConfigGrid, prices: tuple[KernelTime, CollectiveTime], *, has_recomputed: bool
) -> BlockCosts:
    """Compute the costs of blocks of every shape row, and of blocks that are always recomputed if there are any."""
    costs = block_costs(setting, shapes, *prices)
    if not has_recomputed:
        return costs
    # Uneven work may recompute single layers in full, whatever the configuration says: these get costs of their own.
    full = np.full(len(shapes), RECOMPUTE_MODES.index("full"))
    return costs.beside(block_costs(setting, replace(shapes, recompute=full), *prices))


def block_costs(
    setting: Setting, shapes: ConfigGrid, kernel_time: KernelTime, collective_time: CollectiveTime
) -> BlockCosts:
    """Compute the costs of every shape row.

    On unlike hosts, the communication of each kind of device is priced on the links of its own hosts.
    """
    cluster, runtime = setting.cluster, setting.runtime
    times = [block_times(setting.job, device, runtime, shapes, kernel_time) for device in cluster.devices]
    groups = [place(cluster, shapes)]
    if len(cluster.devices) > 1:
        groups = [place_on(cluster, device, shapes) for device in cluster.devices]
    found = [
        block_communication(setting.job, runtime, shapes, own, _beside(of_device), collective_time)
        for of_device, own in zip(times, groups, strict=True)
    ]
    # Launches and collectives do not depend on the kind of device.
    issued = [found[0].collectives[block] for block in BLOCKS]
    costs = BlockCosts(
        compute=np.array([(t.forward, t.backward) for t in times]),
        core=np.array([(t.attention_core,) for t in times]),
        exposed=np.array([_exposed_parts(communication, shapes) for communication in found]),
        hidden=np.array([_by_part(communication.hidden, shapes) for communication in found]),
        host=np.array([times[0].launches * runtime.launch_s, issued]),
        once_s=np.zeros((len(BLOCKS), len(shapes))),
    )
    return _apply_layer_changes(costs, runtime, shapes)


def _apply_layer_changes(costs: BlockCosts, runtime: RuntimeProfile, shapes: ConfigGrid) -> BlockCosts:
    """Apply the runtime's sharding plans to the shape rows [u] that they cover.

    Full recomputation runs a layer's forward pass again, so the repeated part changes by the forward ratio.
    """
    known = {change.key: change for change in runtime.layer_changes}
    found = [(row, known[key]) for row, key in enumerate(change_keys(shapes)) if key in known]
    if not found:
        return costs
    changed = {field.name: getattr(costs, field.name).copy() for field in fields(costs)}
    is_full = shapes.recompute == RECOMPUTE_MODES.index("full")
    # Full recomputation repeats the blocks of layers, but not the embedding and the head.
    in_layer = np.array([block in LAYER_BLOCKS for block in BLOCKS])
    for row, change in found:
        # The backward time holds the repeated forward pass too. It is scaled by the backward ratio first, and the
        # difference between the ratios corrects the repeated part.
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
    """Select the compute of one kind of device beside which communication may run."""
    return Beside(
        products=dict(zip(BLOCKS, times.products, strict=True)),
        weight_gradients=dict(zip(BLOCKS, times.weight_gradients, strict=True)),
        attention_core=times.attention_core.sum(axis=0),
    )


def _exposed_parts(found: BlockCommunication, shapes: ConfigGrid) -> list[list[FloatArray]]:
    """Arrange the exposed communication of blocks by EXPOSED_PARTS [4, len(BLOCKS), u]."""
    by_part: dict[str, dict[Block, FloatArray]] = {
        "tp": found.tp,
        "cp": {Block.ATTENTION: found.cp},
        "up": {Block.ATTENTION: found.up},
        "ep": {Block.MOE_MLP: found.ep},
    }
    return _by_part(by_part, shapes)


def _by_part(by_part: Mapping[str, Mapping[Block, FloatArray]], shapes: ConfigGrid) -> list[list[FloatArray]]:
    """Arrange times of blocks by EXPOSED_PARTS [4, len(BLOCKS), u]; those that are not given are 0."""
    none = np.zeros(len(shapes))
    return [[by_part.get(part, {}).get(block, none) for block in BLOCKS] for part in EXPOSED_PARTS]
