"""Patterns of Megatron-LM's hybrid models, which name one block for each layer: `M-M*-|MEM*E/*E`.

A bar begins the next virtual stage, and what follows a slash is the layer of one module of multi-token prediction.
Sources: megatron-core 0.19.2 models/hybrid/hybrid_layer_allocation.py (the symbols and the grammar, which 0.17 has too)
and training/arguments.py, `validate_args`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodels.blocks.contract import AbstractBlock
from costmodels.job.model_spec import Layer, ModelSpec

MAMBA, NET, ATTENTION, SPARSE, LATENT, MLP, EXPERTS = "M", "G", "*", "D", "+", "-", "E"
PIPE, MTP = "|", "/"

SYMBOLS: Mapping[str, str] = {
    "mamba2": MAMBA,
    "gated_delta_net": NET,
    "attention": ATTENTION,
    "sparse_latent_attention": SPARSE,
    "latent_attention": LATENT,
    "dense_mlp": MLP,
    "experts": EXPERTS,
}
"""Symbol of each kind of block."""


def has_pattern(model: ModelSpec) -> bool:
    """Return whether Megatron-LM runs the model as a hybrid: it knows all blocks, and some layer is none of a GPT.

    Layers of a GPT are a mixer without a state space and an MLP. Those of a hybrid model run one after the other, each
    with a norm of its own; attention cannot stand beside latent attention.
    """
    layers = [*model.layers, model.mtp_layer]
    blocks = {block for layer in layers for block in layer}
    if any(block.kind not in SYMBOLS or getattr(block, "norms", 0.0) != 1.0 for block in blocks):
        return False
    found = {SYMBOLS[block.kind] for block in blocks}
    if ATTENTION in found and not found.isdisjoint((SPARSE, LATENT)):
        return False
    return MAMBA in found or any(len(layer) == 1 for layer in model.layers)


def pattern_of(model: ModelSpec, layers_of_part: Sequence[int]) -> str:
    """Return the pattern of a model whose virtual stages have these numbers of layers."""
    assert sum(layers_of_part) == model.num_layers, "every layer is in a virtual stage"
    parts, begin = [], 0
    for number in layers_of_part:
        parts.append("".join(map(_symbols, model.layers[begin : begin + number])))
        begin += number
    predicting = _symbols(model.mtp_layer or model.layers[-1])
    return MTP.join((PIPE.join(parts), *[predicting] * model.num_mtp_layers))


def _symbols(layer: Layer) -> str:
    return "".join(_symbol(block) for block in layer)


def _symbol(block: AbstractBlock) -> str:
    return SYMBOLS[block.kind]
