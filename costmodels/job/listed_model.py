"""Read a model whose file lists its blocks.

    hidden_size: 2048
    vocab_size: 151936
    tied_embeddings: false
    norm: rms
    num_layers: 48
    blocks:
      near: {kind: attention, num_heads: 16, num_kv_heads: 2, head_dim: 128, mask: {window: 1024}}
      far: {kind: attention, num_heads: 16, num_kv_heads: 2, head_dim: 128}
      mlp: {kind: dense_mlp, ffn_size: 5120, gated: true}
    layers: [[near, mlp], [near, mlp], [near, mlp], [far, mlp]]
    mtp_layer: [far, mlp]

The layers are repeated until there are num_layers of them. Modules of multi-token prediction (num_mtp_layers) have the
blocks of mtp_layer, or those of the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, create_model

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.mask import Mask
from costmodels.blocks.registry import block_kinds
from costmodels.job.decoder import MAX_COUNT, MAX_LAYERS, Norm
from costmodels.job.model_spec import ModelSpec
from hardware.io.config_file import StrictModel, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]

ENDS = (
    *("embedding", "head", "prediction_join", "projection", "tower_part"),
    *("traced_experts", "traced_mixer", "traced_mlp"),
)
"""Kinds of blocks that no file lists: the file's other keys, a config.json or a trace make them."""

OF_THE_MODEL = ("hidden_size", "norm_size")
"""Sizes of a block that the model gives."""


class _Mask(StrictModel):
    causal: bool = True
    window: NotNegative = 0
    chunk: NotNegative = 0


class _ListedModel(StrictModel):
    name: str
    source: str = "its file"
    assumed: list[str] = Field(default_factory=list)
    hidden_size: Count
    vocab_size: Count
    tied_embeddings: bool
    learned_positions: NotNegative = 0
    norm: Norm
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_mtp_layers: NotNegative = 0
    blocks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    layers: Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]
    mtp_layer: list[str] = Field(default_factory=list)


def lists_blocks(mapping: Mapping[str, Any]) -> bool:
    """Return whether the keys of a model file list blocks."""
    return "blocks" in mapping


def listed_model(mapping: Mapping[str, Any], *, name: str, file: str) -> ModelSpec:
    """Return the model whose file lists its blocks.

    Raises:
        ConfigError: a key is unknown or missing, a size is no count, or a layer names no block.
    """
    read = validate_mapping(_ListedModel, {"name": name, **mapping}, file=file)
    norm_size = read.hidden_size * (2 if read.norm == "layer" else 1)
    blocks = {
        key: _block(key, values, hidden_size=read.hidden_size, norm_size=norm_size, file=file)
        for key, values in read.blocks.items()
    }
    named = {f"layers[{at}]": layer for at, layer in enumerate(read.layers)} | {"mtp_layer": read.mtp_layer}
    for place, layer in named.items():
        for key in layer:
            if key not in blocks:
                raise ConfigError("names no block", file=file, key=place, value=key, nearest=did_you_mean(key, blocks))
    if read.mtp_layer and not read.num_mtp_layers:
        raise ConfigError("needs num_mtp_layers, how many such modules there are", file=file, key="mtp_layer")
    rows = [tuple(blocks[key] for key in layer) for layer in read.layers]
    return ModelSpec(
        name=read.name,
        source=read.source,
        assumed=tuple(read.assumed),
        hidden_size=read.hidden_size,
        tied_embeddings=read.tied_embeddings,
        norm=read.norm,
        layers=tuple(rows[at % len(rows)] for at in range(read.num_layers)),
        embedding=Embedding(
            hidden_size=read.hidden_size, vocab_size=read.vocab_size, learned_positions=read.learned_positions
        ),
        head=Head(
            hidden_size=read.hidden_size,
            vocab_size=read.vocab_size,
            has_table=not read.tied_embeddings,
            norm_size=norm_size,
        ),
        num_mtp_layers=read.num_mtp_layers,
        mtp_layer=tuple(blocks[key] for key in read.mtp_layer),
    )


def _block(key: str, values: Mapping[str, Any], *, hidden_size: int, norm_size: int, file: str) -> AbstractBlock:
    known = {name: own for name, own in block_kinds().items() if name not in ENDS}
    kind = values.get("kind")
    if kind not in known:
        rule = "is no kind of block of a layer" if "kind" in values else "is required and missing"
        nearest = did_you_mean(str(kind), known)
        raise ConfigError(rule, file=file, key=f"blocks.{key}.kind", value=kind, nearest=nearest)
    own = {name: value for name, value in values.items() if name != "kind"}
    try:
        read = validate_mapping(_keys_of(kind), own, file=file)
    except ConfigError as error:
        raise error.under(f"blocks.{key}") from None
    sizes = {name: getattr(read, name) for name in type(read).model_fields}
    if "mask" in sizes:
        sizes["mask"] = Mask(**sizes["mask"].model_dump())
    return known[kind](**sizes, hidden_size=hidden_size, norm_size=norm_size)


@cache
def _keys_of(kind: str) -> type[StrictModel]:
    """Return the keys of one kind of block."""
    block = block_kinds()[kind]
    types, keys = get_type_hints(block), dict[str, Any]()
    for field in fields(block):  # type: ignore[arg-type] # every kind is a dataclass of its sizes
        if field.name in OF_THE_MODEL:
            continue
        if field.name == "mask":
            keys["mask"] = (_Mask, Field(default_factory=_Mask))
            continue
        is_required = field.default is MISSING
        kind_of = types[field.name]
        if kind_of is int:
            kind_of = Count if is_required else NotNegative
        keys[field.name] = (kind_of, ... if is_required else field.default)
    return create_model(f"_{block.__name__}", __base__=StrictModel, **keys)


def listed_keys(model: ModelSpec) -> dict[str, Any]:
    """Return the keys of a file that lists the blocks of a model; sizes that have their defaults are left out.

    The layers are those of the shortest period.
    """
    named = dict(zip(model.blocks, model.block_names, strict=True))
    rows = [[named[block] for block in layer] for layer in model.layers]
    period = next(n for n in range(1, len(rows) + 1) if all(rows[at] == rows[at % n] for at in range(len(rows))))
    predicting = [named[block] for block in model.mtp_layer]
    used = {name for row in (*rows, predicting) for name in row}
    own = {
        name: getattr(model, name) for name in ("hidden_size", "vocab_size", "tied_embeddings", "norm", "num_layers")
    }
    own |= {name: getattr(model, name) for name in ("learned_positions", "num_mtp_layers") if getattr(model, name)}
    blocks = {name: _stated(block) for block, name in named.items() if name in used}
    return {**own, "blocks": blocks, "layers": rows[:period], **({"mtp_layer": predicting} if predicting else {})}


def _stated(block: AbstractBlock) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": block.kind}
    for field in fields(block):  # type: ignore[arg-type] # every kind is a dataclass of its sizes
        value = getattr(block, field.name)
        if field.name in OF_THE_MODEL or value == field.default:
            continue
        if field.name == "mask":
            if value != Mask():
                found["mask"] = {one.name: getattr(value, one.name) for one in fields(value)}
            continue
        found[field.name] = value
    return found
