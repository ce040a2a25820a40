"""Kinds of blocks by their names, and blocks of the sizes that a file or a storage holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.head import Head
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.lightning_attention import LightningAttention
from costmodels.blocks.mamba1 import Mamba1
from costmodels.blocks.mamba2 import Mamba2
from costmodels.blocks.prediction_join import PredictionJoin
from costmodels.blocks.short_convolution import ShortConvolution
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from hardware.io.errors import ConfigError, did_you_mean

KINDS: Mapping[str, type[AbstractBlock]] = {
    kind.kind: kind
    for kind in (
        *(Attention, LatentAttention, SparseLatentAttention),
        *(GatedDeltaNet, LightningAttention, Mamba1, Mamba2, ShortConvolution),
        *(DenseMlp, Experts, PredictionJoin, Embedding, Head),
    )
}
"""Classes of blocks by kind."""


def block_of(described: Mapping[str, Any]) -> AbstractBlock:
    """Return the block with these sizes; `kind` names its kind.

    Raises:
        ConfigError: The kind or a size is unknown.
        ValueError: A size is missing, or of a wrong type.
    """
    sizes = dict(described)
    kind = str(sizes.pop("kind", ""))
    if kind not in KINDS:
        raise ConfigError("unknown kind of block", key="kind", value=kind, nearest=did_you_mean(kind, KINDS))
    known = [field.name for field in fields(KINDS[kind])]  # type: ignore[arg-type] # every kind is a dataclass
    for name, value in sizes.items():
        if name not in known:
            raise ConfigError(f"is no size of {kind}", key=name, value=value, nearest=did_you_mean(name, known))
    block: AbstractBlock = _adapter_of(kind).validate_python(sizes)
    return block


@cache
def _adapter_of(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(KINDS[kind])
