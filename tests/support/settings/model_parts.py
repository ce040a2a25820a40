"""Parts of a model that tests count: its layers and blocks, and the parameters of one layer."""

from __future__ import annotations

from collections import Counter

import numpy as np

from costmodels.blocks.operator import Family
from costmodels.job.model_spec import Layer, ModelSpec
from hardware.arrays import IntArray


def has_experts(layer: Layer) -> bool:
    """Check whether a layer routes tokens to experts."""
    return any(block.family is Family.EXPERTS for block in layer)


def num_moe_layers(model: ModelSpec) -> int:
    """Count the layers with experts."""
    return sum(map(has_experts, model.layers))


def split_by_experts(model: ModelSpec, held: IntArray) -> tuple[IntArray, IntArray]:
    """Return the layers of the main model without and with experts among `held` pieces [..., P], each [...]."""
    last, rows = model.piece_of_layer, np.arange(len(model.pieces))
    is_moe = np.isin(rows, [at for at, layer in zip(last, model.layers, strict=True) if has_experts(layer)])
    is_dense = np.isin(rows, [at for at, layer in zip(last, model.layers, strict=True) if not has_experts(layer)])
    return held @ is_dense, held @ is_moe


def parameters_of(layer: Layer) -> int:
    """Return the parameters of one layer."""
    return sum(block.parameters for block in layer)


def active_parameters_of(layer: Layer) -> int:
    """Return the parameters of one layer that a token uses."""
    return sum(block.active_parameters for block in layer)


def times_of_blocks(model: ModelSpec, *, with_prediction: bool = True) -> Counter[str]:
    """Count how often the whole model has each of its blocks, by name; prediction modules may be left out."""
    modules = (model.prediction,) * model.num_mtp_layers if with_prediction else ()
    every = [block for layer in (*model.layers, *modules) for block in layer] + [model.embedding, model.head]
    names = dict(zip(model.blocks, model.block_names, strict=True))
    return Counter(names[block] for block in every)


def row_of(model: ModelSpec, name: str) -> int:
    """Return the row of a block in arrays with one for each block [B], by its name."""
    return model.block_names.index(name)
