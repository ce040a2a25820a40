"""Costs of one block and micro-batch on each kind of device: kernels, exposed collectives and launches.

Letters: B blocks of the model, d kinds of devices, u unique shape rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from costmodels.blocks.operator import Family, Operator, OpKind, Phase
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, execution_s
from costmodels.operators.layer_operators import core_operators, recomputed_share, step_operators, unique_tokens
from costmodels.step.changed_layers import change_keys, of_blocks
from costmodels.step.communication import Beside, block_communication
from costmodels.step.launches import launches_of
from costmodels.step.placement import place, place_on
from hardware.arrays import FloatArray, IntArray
from hardware.device import Device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTimes:
    """Compute time of one block and micro-batch on one kind of device [s], each array [B, u].

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
    outside = [operator for operator in step_operators(job, runtime, tokens) if not operator.is_core]
    both = (
        _sum_by_block(outside, job, device, runtime, tokens, kernel_time),
        _sum_by_block(core_operators(job, runtime, shapes), job, device, runtime, shapes, kernel_time),
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
    number = {name: at for at, name in enumerate(job.model.block_names)}
    sums = BlockTimes(**{f.name: np.zeros((len(number), len(shapes))) for f in fields(BlockTimes)})
    for operator in operators:
        block = number[operator.block]
        seconds = execution_s(operator, device, job, runtime, shapes, kernel_time)
        runs = (operator.moved_bytes > 0) * launches_of(runtime, operator)
        if operator.phase == Phase.FORWARD:
            # A recomputed operator runs in the forward pass and once more in the backward pass.
            again = recomputed_share(job, runtime, operator, shapes)
            sums.forward[block] += seconds
            sums.backward[block] += again * seconds
            sums.launches[block] += runs * (1.0 + again)
        else:
            sums.backward[block] += seconds
            sums.launches[block] += runs
        if operator.is_core and operator.family is not Family.TOWER:  # images do not vary with the sequences
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
        compute: Time of the forward and the backward pass on each kind of device [s], [d, 2, B, u].
        core: Part of both passes that the attention core takes [s], [d, 1, B, u].
        exposed: Exposed time of EXPOSED_PARTS beside the compute of each kind of device [s], [d, 4, B, u].
        hidden: Further time of the collectives of tp and ep, beside compute [s], [d, 4, B, u]; the ring's is
            not counted.
        host: Time to launch the operators [s], and the number of collectives, [2, B, u].
        once_s: Time of weight collectives that a sharding plan adds to Megatron's plan once per step [s], [B,
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
    costs = BlockCosts(
        compute=np.array([(t.forward, t.backward) for t in times]),
        core=np.array([(t.attention_core,) for t in times]),
        exposed=np.array([communication.exposed for communication in found]),
        hidden=np.array([communication.hidden for communication in found]),
        host=np.array([times[0].launches * runtime.launch_s, found[0].collectives]),
        once_s=np.zeros((len(setting.job.model.blocks), len(shapes))),
    )
    return _apply_layer_changes(costs, setting.job.model, runtime, shapes)


def _apply_layer_changes(
    costs: BlockCosts, model: ModelSpec, runtime: RuntimeProfile, shapes: ConfigGrid
) -> BlockCosts:
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
    in_layer, names = model.is_layer_block, model.planned_names
    for row, change in found:
        # The backward time holds the repeated forward pass too. It is scaled by the backward ratio first, and the
        # difference between the ratios corrects the repeated part.
        forward, backward = of_blocks(change, change.compute, names, other=1.0)
        again = in_layer * is_full[row]
        repeated = again * changed["compute"][:, 0, :, row]
        changed["compute"][:, 1, :, row] *= backward
        changed["compute"][:, 1, :, row] += (forward - backward) * repeated
        changed["compute"][:, 0, :, row] *= forward
        forward_s, backward_s = of_blocks(change, change.added_s, names, other=0.0) / runtime.network_efficiency
        changed["exposed"][..., row] *= of_blocks(change, change.exposed, names, other=1.0)
        changed["exposed"][..., row] += (1 + again) * forward_s + backward_s
        changed["once_s"][..., row] += of_blocks(change, change.once_s, names, other=0.0) / runtime.network_efficiency
    return replace(costs, **changed)


def _beside(times: BlockTimes) -> Beside:
    """Select the compute of one kind of device beside which communication may run."""
    return Beside(products=times.products, weight_gradients=times.weight_gradients, core=times.attention_core)
