"""Models as JSON, and back: how storages and reports keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.registry import block_kinds
from costmodels.blocks.tower_part import TowerPart
from costmodels.job.decoder import Decoder
from costmodels.job.model_spec import ModelSpec, plain_model
from costmodels.job.tower import Tower
from hardware.io.errors import ConfigError, did_you_mean

_OWN = ("name", "source", "assumed", "hidden_size", "tied_embeddings", "norm", "num_mtp_layers", "left_out", "remarks")


def describe_model(model: ModelSpec) -> dict[str, Any]:
    """Return the sizes of a model as JSON: the keys of a plain decoder, or its blocks and the blocks of every layer."""
    if model.is_plain:
        return asdict(model.plain)
    kinds = [[model.block_names[at] for at in piece.blocks] for piece in model.pieces]
    named = [
        (name, block)
        for name, block in zip(model.block_names, model.blocks, strict=True)
        if not isinstance(block, TowerPart)
    ]
    found = {
        **{name: getattr(model, name) for name in _OWN},
        "blocks": {name: {"kind": block.kind, **_sizes_of(block)} for name, block in named},
        "layers": [kinds[at] for at in model.piece_of_layer.tolist()],
    }
    if model.mtp_layer:
        found["mtp_layer"] = [model.block_names[model.blocks.index(block)] for block in model.mtp_layer]
    if model.towers:
        found["towers"] = {tower.name: [_describe_part(part) for part in tower.parts] for tower in model.towers}
    return found if model.decoder is None else found | {"decoder": asdict(model.decoder)}


_LATER = {
    "attention": ("distance_table",),
    "embedding": ("token_types", "norm_size", "layer_inputs", "layer_vocab_size", "layer_norm_size"),
    "head": ("norms", "transform_size", "is_pooled"),
}
"""Sizes that earlier versions had not, by kind: at their defaults they are left out, as those versions wrote blocks."""


def _sizes_of(block: AbstractBlock) -> dict[str, Any]:
    assert is_dataclass(block), "a kind of block is a dataclass of its sizes"
    found, later = asdict(block), _LATER.get(block.kind, ())
    for field in fields(block):
        if field.name in later and found[field.name] == field.default:
            del found[field.name]
    return found


def _describe_part(part: TowerPart) -> dict[str, Any]:
    own = {name: getattr(part, name) for name in ("hidden_size", "images", "tokens", "trained")}
    return {"block": {"kind": part.part.kind, **_sizes_of(part.part)}, **own}


def _described_tower(name: str, parts: Iterable[Mapping[str, Any]]) -> Tower:
    found = []
    for described in parts:
        own = dict(described)
        found.append(TowerPart(tower=name, part=_block_of(own.pop("block")), **own))
    return Tower(name=name, parts=tuple(found))


def described_model(described: Mapping[str, Any]) -> ModelSpec:
    """Return the model that `describe_model` has described; earlier versions described plain decoders alike.

    Raises:
        ConfigError: A key, a kind of block or a size is unknown or wrong.
        ValueError: A size of a block is missing, or of a wrong type.
    """
    own = dict(described)
    if "layers" not in own:
        return plain_model(**_keys_of(own))
    blocks = {name: _block_of(sizes) for name, sizes in own.pop("blocks").items()}
    layers = tuple(tuple(blocks[name] for name in layer) for layer in own.pop("layers"))
    own["mtp_layer"] = tuple(blocks[name] for name in own.get("mtp_layer", ()))
    decoder = Decoder(**_keys_of(own.pop("decoder"))) if "decoder" in own else None
    own["towers"] = tuple(_described_tower(name, parts) for name, parts in own.get("towers", {}).items())
    if unknown := own.keys() - _OWN - {"mtp_layer", "towers"}:
        raise ConfigError("unknown key of a model", key=min(unknown))
    own |= {name: tuple(own.get(name, ())) for name in ("assumed", "left_out", "remarks")}
    embedding, head = blocks["embedding"], blocks["head"]
    if not isinstance(embedding, Embedding) or not isinstance(head, Head):
        raise ConfigError("must have an embedding and a head of these names", key="blocks")
    return ModelSpec(**own, layers=layers, embedding=embedding, head=head, decoder=decoder)


def _keys_of(decoder: Mapping[str, Any]) -> dict[str, Any]:
    _check_known(decoder, [field.name for field in fields(Decoder)], owner="a decoder")
    return {**decoder, "assumed": tuple(decoder.get("assumed", ()))}


def _block_of(described: Mapping[str, Any]) -> AbstractBlock:
    sizes, kinds = dict(described), block_kinds()
    kind = str(sizes.pop("kind", ""))
    if kind not in kinds:
        raise ConfigError("unknown kind of block", key="kind", value=kind, nearest=did_you_mean(kind, kinds))
    _check_known(sizes, [field.name for field in fields(kinds[kind])], owner=kind)  # type: ignore[arg-type] # dataclasses
    block: AbstractBlock = _adapter_of(kind).validate_python(sizes)
    return block


def _check_known(sizes: Mapping[str, Any], known: list[str], *, owner: str) -> None:
    for name, value in sizes.items():
        if name not in known:
            raise ConfigError(f"is no size of {owner}", key=name, value=value, nearest=did_you_mean(name, known))


@cache
def _adapter_of(kind: str) -> TypeAdapter[Any]:
    of_kind: Any = block_kinds()[kind]
    return TypeAdapter(of_kind)
