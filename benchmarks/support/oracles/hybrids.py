"""Hybrid models for draws: state spaces, attention, and MLPs or experts, each a layer of its own."""

from __future__ import annotations

from dataclasses import replace

from costmodels.blocks.mamba2 import Mamba2
from costmodels.job.model_spec import ModelSpec


def hybrid(model: ModelSpec) -> ModelSpec:
    """Return a hybrid model of the sizes of a plain decoder, with as many layers, but at least one of each kind.

    A state space, attention and an MLP or experts take turns; the states have as many groups as attention has key-value
    heads.
    """
    decoder = model.plain
    states = Mamba2(
        hidden_size=decoder.hidden_size,
        num_heads=decoder.num_heads,
        head_dim=2 * decoder.head_dim,
        num_groups=decoder.num_kv_heads,
        state_size=16,
        norm_size=decoder.norm_size,
    )
    ffn = decoder.experts() if decoder.is_moe else decoder.dense_mlp()
    row = ((states,), (decoder.attention(),), (ffn,))
    layers = row + row * decoder.num_layers
    return replace(model, layers=layers[: max(decoder.num_layers, 3)], decoder=None)
