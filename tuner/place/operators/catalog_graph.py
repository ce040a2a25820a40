"""A model of the catalog as operators: pieces of equally many layers, and the passes of every micro-batch through them.

Times are those of the cost model's operators of one device (`costmodels/operators`), summed over the layers of a piece.
The first piece has the embedding, the last one the head. All passes through a piece run on one device, because they
share its weights. A piece holds them from beginning to end, in training with gradients and optimizer states. Inference
keeps the activations of two layers at a time while it runs; training those of all layers, from the forward pass of a
micro-batch to its backward pass. The accumulation of gradients and the optimizer's update are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodels.blocks.operator import Phase
from costmodels.job.model_catalog import load_model
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import step_operators
from costmodels.step.memory.activations import layer_activations
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError
from tuner.place.operators.file_keys import MOST_OPERATORS, ModelKeys
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
    passes = own.pieces * own.micro_batches * (2 if own.job == "train" else 1)
    if passes > MOST_OPERATORS:
        rule = f"make {passes} operators; at most {MOST_OPERATORS} can be placed"
        raise ConfigError(rule, key="pieces", value=own.pieces, nearest="fewer pieces or micro-batches")
    found = tuple(_passes(own, job, site))
    for piece in found:
        check_room(
            piece.memory_bytes + piece.working_bytes,
            site,
            piece.exec_s,
            key="pieces",
            nearest="more pieces, or fewer sequences",
        )
    return found


def _passes(own: ModelKeys, job: TrainingJob, site: Site) -> Iterator[PricedOperator]:
    """Yield the passes of all micro-batches; the first forward pass of a piece holds its weights."""
    runtime = find_runtime(RUNTIME)
    grid = ConfigGrid.from_configs([ParallelConfig(mbs=own.sequences)])
    block_s = _block_seconds(job, site, grid)
    trains = own.job == "train"
    states = max(runtime.gradient_bytes, job.element_bytes) + job.optimizer_state_bytes if trains else 0
    message_bytes = float(job.element_bytes * job.sequence_length * own.sequences * job.model.hidden_size)
    pieces = [piece.tolist() for piece in np.array_split(np.arange(job.model.num_layers), own.pieces)]
    kept = [_kept_bytes(job, layers, grid) for layers in pieces]
    for batch in range(own.micro_batches):
        for at, layers in enumerate(pieces):
            held = _parameters(job.model, layers) * (job.element_bytes + states)
            working = 0.0 if trains else 2 * max(kept[at])
            yield PricedOperator(
                name=_name("forward", batch, layers),
                exec_s=_seconds(job.model, layers, block_s[Phase.FORWARD]),
                memory_bytes=held if batch == 0 else 0.0,
                working_bytes=working,
                inputs=((_name("forward", batch, pieces[at - 1]), message_bytes),) if at else (),
                same_device_as=_name("forward", 0, layers) if batch else None,
            )
        for at in reversed(range(own.pieces if trains else 0)):
            forward = _name("forward", batch, pieces[at])
            after = ((_name("backward", batch, pieces[at + 1]), message_bytes),) if at + 1 < own.pieces else ()
            yield PricedOperator(
                name=_name("backward", batch, pieces[at]),
                exec_s=_seconds(job.model, pieces[at], block_s[Phase.BACKWARD]),
                memory_bytes=0.0,
                inputs=(*after, (forward, sum(kept[at]))),
                same_device_as=forward,
            )


def _name(phase: str, batch: int, layers: list[int]) -> str:
    """Return the name of a pass: the micro-batch counts from 0, as the layers do."""
    return f"{phase} {batch}: {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{phase} {batch}: {layers[0]}"


def _kept_bytes(job: TrainingJob, layers: list[int], grid: ConfigGrid) -> list[float]:
    """Return the activations that each of some layers keeps until its backward pass [bytes]."""
    kept = layer_activations(job, find_runtime(RUNTIME), grid)
    return [float(own) for own in kept.kept[job.model.piece_of_layer[layers], 0]]


def _block_seconds(job: TrainingJob, site: Site, grid: ConfigGrid) -> dict[Phase, FloatArray]:
    """Return the time of each pass of each block on every device [B, D]."""
    runtime, place = find_runtime(RUNTIME), {name: at for at, name in enumerate(job.model.block_names)}
    found = {phase: np.zeros((len(place), len(site.devices))) for phase in Phase}
    for operator in step_operators(job, runtime, grid):
        seconds = {device: float(execution_s(operator, device, job, runtime, grid)[0]) for device in set(site.devices)}
        found[operator.phase][place[operator.block]] += [seconds[device] for device in site.devices]
    return found


def _pieces(model: ModelSpec, layers: list[int]) -> FloatArray:
    """Count the pieces of some neighbouring layers, with the ends of the model that they have [P]."""
    held = np.bincount(model.piece_of_layer[layers], minlength=len(model.pieces)).astype(np.float64)
    held[-2], held[-1] = 0 in layers, model.num_layers - 1 in layers
    if model.num_mtp_layers and held[-1]:
        held[-3] = model.num_mtp_layers
    return held


def _seconds(model: ModelSpec, layers: list[int], block_s: FloatArray) -> tuple[float, ...]:
    """Return the time of some neighbouring layers on every device, with the ends of the model that they have [D]."""
    return tuple((_pieces(model, layers) @ model.blocks_of_piece @ block_s).tolist())


def _parameters(model: ModelSpec, layers: list[int]) -> int:
    """Return the parameters of some neighbouring layers, with the ends of the model that they have."""
    held = _pieces(model, layers)
    total = held @ model.blocks_of_piece @ np.array([block.parameters for block in model.blocks], dtype=np.float64)
    # a tied head is a second copy where it is not with the embedding
    has_copy = model.tied_embeddings and held[-1] and not held[-2]
    return round(float(total)) + (model.head.table if has_copy else 0)
