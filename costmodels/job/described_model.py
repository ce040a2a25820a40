"""Models as JSON, and back: how storages and reports keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.head import Head
from costmodels.blocks.kinds import block_of
from costmodels.job.model_spec import ModelSpec, plain_model
from hardware.io.errors import ConfigError

_OWN = ("name", "source", "assumed", "hidden_size", "tied_embeddings", "norm", "num_mtp_layers", "left_out")


def describe_model(model: ModelSpec) -> dict[str, Any]:
    """Return the sizes of a model as JSON: the keys of a plain decoder, or its blocks and the blocks of every layer."""
    if model.decoder is not None:
        return asdict(model.decoder)
    kinds = [[model.block_names[at] for at in piece.blocks] for piece in model.pieces]
    named = zip(model.block_names, model.blocks, strict=True)
    return {
        **{name: getattr(model, name) for name in _OWN},
        "blocks": {name: {"kind": block.kind, **_sizes_of(block)} for name, block in named},
        "layers": [kinds[at] for at in model.piece_of_layer.tolist()],
    }


def _sizes_of(block: AbstractBlock) -> dict[str, Any]:
    assert is_dataclass(block), "a kind of block is a dataclass of its sizes"
    return asdict(block)


def described_model(described: Mapping[str, Any]) -> ModelSpec:
    """Return the model that `describe_model` has described; earlier versions described plain decoders alike.

    Raises:
        ConfigError: A key, a kind of block or a size is unknown or wrong.
        ValueError: A size of a block is missing, or of a wrong type.
    """
    own = {**described, "assumed": tuple(described.get("assumed", ()))}
    if "layers" not in own:
        return _plain(own)
    own["left_out"] = tuple(own.get("left_out", ()))
    blocks = {name: block_of(sizes) for name, sizes in own.pop("blocks").items()}
    embedding, head = blocks["embedding"], blocks["head"]
    if not isinstance(embedding, Embedding) or not isinstance(head, Head):
        raise ConfigError("must have an embedding and a head of these names", key="blocks")
    layers = tuple(tuple(blocks[name] for name in layer) for layer in own.pop("layers"))
    if unknown := own.keys() - _OWN:
        raise ConfigError("unknown key of a model", key=min(unknown))
    return ModelSpec(**own, layers=layers, embedding=embedding, head=head)


def _plain(keys: dict[str, Any]) -> ModelSpec:
    try:
        return plain_model(**keys)
    except TypeError as error:
        raise ConfigError(f"has other keys than those of a decoder: {error}", key="model") from None
