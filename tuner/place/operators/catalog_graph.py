"""The forward pass of a model of the catalog as a chain of operators: pieces of equally many layers.

Times are those of the cost model's operators of one device (`costmodels/operators`), summed over the layers of a piece.
The first piece has the embedding, the last one the head. A piece holds its weights, and the activations of two layers.

There is no backward pass: it would need the weights of its piece, and the problem has no operators that must share a
device. Training is planned as a whole by `meshtune rank`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodels.job.model_catalog import load_model
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import Block, Phase, step_operators
from costmodels.step.memory import layer_activations
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError
from tuner.place.operators.file_keys import ModelKeys
from tuner.place.operators.pricing import PricedOperator, Site, check_room

RUNTIME = "megatron-core"
"""Profile whose kernels and widths of numbers are assumed."""


def operators_of_model(own: ModelKeys, site: Site, base_dir: Path) -> tuple[PricedOperator, ...]:
    """Return the operators of a model of the catalog, each after those whose results it takes.

    Args:
        own: Keys of the model.
        site: Devices and links.
        base_dir: Folder of the file that names the model.

    Raises:
        ConfigError: A value can't work.
    """
    try:
        model = load_model(own.name, base_dir)
    except ConfigError as error:
        raise ConfigError(error.rule, key="name", value=error.value, nearest=error.nearest, file=error.file) from None
    job = TrainingJob(
        model=model, sequence_length=own.sequence_length, global_batch_size=own.sequences, precision=site.precision
    )
    for device in site.devices:
        device.peak_flop_per_s(site.precision)  # refuses a format that the device lacks
    if own.pieces > job.model.num_layers:
        rule = f"is more than the {job.model.num_layers} layers of the model"
        raise ConfigError(rule, key="pieces", value=own.pieces)
    found = tuple(_chain(own, job, site))
    for piece in found:
        check_room(piece.memory_bytes, site, piece.exec_s, key="pieces", nearest="more pieces, or fewer sequences")
    return found


def _chain(own: ModelKeys, job: TrainingJob, site: Site) -> Iterator[PricedOperator]:
    runtime = find_runtime(RUNTIME)
    grid = ConfigGrid.from_configs([ParallelConfig(mbs=own.sequences)])
    block_s = _block_seconds(job, site, grid)
    kept = layer_activations(job, runtime, grid)
    message_bytes = float(job.element_bytes * job.sequence_length * own.sequences * job.model.hidden_size)
    before = ""
    for at, piece in enumerate(np.array_split(np.arange(job.model.num_layers), own.pieces)):
        layers: list[int] = piece.tolist()
        # as in the forward passes of modules: a layer's activations and those that the next one makes of them
        alive = max(float((kept.moe if job.model.is_moe_layer(layer) else kept.dense)[0]) for layer in layers)
        name = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        yield PricedOperator(
            name=name,
            exec_s=_seconds(job.model, layers, block_s),
            memory_bytes=job.element_bytes * _parameters(job.model, layers) + 2 * alive,
            inputs=((before, message_bytes),) if at else (),
        )
        before = name


def _block_seconds(job: TrainingJob, site: Site, grid: ConfigGrid) -> dict[Block, FloatArray]:
    """Return the time of the forward pass of each block on every device [D]."""
    runtime = find_runtime(RUNTIME)
    found: dict[Block, FloatArray] = {block: np.zeros(len(site.devices)) for block in Block}
    for operator in step_operators(job, runtime, grid):
        if operator.phase == Phase.FORWARD:
            seconds = {
                device: float(execution_s(operator, device, job, runtime, grid)[0]) for device in set(site.devices)
            }
            found[operator.block] += [seconds[device] for device in site.devices]
    return found


def _seconds(model: ModelSpec, layers: list[int], block_s: dict[Block, FloatArray]) -> tuple[float, ...]:
    """Return the time of some neighbouring layers on every device, with the ends of the model that they have [D]."""
    total = np.zeros_like(block_s[Block.HEAD])
    for layer in layers:
        total += block_s[Block.ATTENTION]
        total += block_s[Block.MOE_MLP if model.is_moe_layer(layer) else Block.DENSE_MLP]
    if 0 in layers:
        total += block_s[Block.EMBEDDING]
    if model.num_layers - 1 in layers:
        total += block_s[Block.HEAD]
    return tuple(total.tolist())


def _parameters(model: ModelSpec, layers: list[int]) -> int:
    """Return the parameters of some neighbouring layers, with the ends of the model that they have."""
    moe = sum(model.is_moe_layer(layer) for layer in layers)
    total = moe * model.moe_layer_parameters + (len(layers) - moe) * model.dense_layer_parameters
    if 0 in layers:
        total += model.embedding_parameters + model.position_parameters
    if model.num_layers - 1 in layers:
        # a tied head is a second copy where it is not with the embedding
        table = model.head_parameters or (0 if 0 in layers else model.embedding_parameters)
        total += table + model.final_norm_parameters
    return total
