"""A model: a row of layers, each a row of blocks, between an embedding and an output head.

Letters: L layers, B distinct blocks, P pieces, s = sequence length [tokens]. All counts are exact integers of whole,
unsharded tensors, independent of bytes, devices and parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.embedding import Embedding
from costmodels.blocks.experts import Experts
from costmodels.blocks.head import Head
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mask import Mask
from costmodels.blocks.operator import LAYER_FAMILIES, Family
from costmodels.blocks.prediction_join import PredictionJoin
from costmodels.job.decoder import Decoder
from costmodels.job.tower import Tower
from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError

_MASKED = (Attention, LatentAttention)

Layer = tuple[AbstractBlock, ...]
"""Blocks of one layer, in the order in which they run."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a model that stands on one virtual stage as a whole: a kind of layer, or an end.

    Attributes:
        name: Name of the piece, for example "dense layer".
        blocks: Positions of its blocks in `ModelSpec.blocks`, in the order in which they run.
        is_layer: Whether it counts as a layer, which recomputation may run again in full.
    """

    name: str
    blocks: tuple[int, ...]
    is_layer: bool


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    Attributes:
        name: Name of the model in reports.
        source: Publication of the sizes.
        assumed: Names of the keys that no public source states.
        hidden_size: Width of a token.
        tied_embeddings: Whether the output head is the embedding table.
        norm: Kind of norms: `rms` has a weight, `layer` a weight and a bias.
        layers: Blocks of every layer of the main model [L].
        embedding: Embedding.
        head: Output head.
        num_mtp_layers: Multi-token prediction modules, each with a layer like the last one (DeepSeek-V3, arXiv
            2412.19437, section 2.2).
        mtp_layer: Blocks of the layer of a prediction module, if it is not like the last one.
        towers: Towers beside the layers, on the first stage.
        left_out: Parts of the model that are not priced, for notes.
        remarks: Sentences about how the model was read, for notes.
        decoder: Keys of the model if it is a plain decoder, or would be one without the masks of its attention.
    """

    name: str
    source: str
    assumed: tuple[str, ...] = ()
    hidden_size: int
    tied_embeddings: bool
    norm: str
    layers: tuple[Layer, ...]
    embedding: Embedding
    head: Head
    num_mtp_layers: int = 0
    mtp_layer: Layer = ()
    towers: tuple[Tower, ...] = ()
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    decoder: Decoder | None = None

    @classmethod
    def of(cls, decoder: Decoder) -> ModelSpec:
        """Return the model of a plain decoder."""
        h, norm_size = decoder.hidden_size, decoder.norm_size
        return cls(
            name=decoder.name,
            source=decoder.source,
            assumed=decoder.assumed,
            hidden_size=h,
            tied_embeddings=decoder.tied_embeddings,
            norm=decoder.norm,
            layers=decoder.layers(),
            embedding=Embedding(
                hidden_size=h, vocab_size=decoder.vocab_size, learned_positions=decoder.learned_positions
            ),
            head=Head(
                hidden_size=h, vocab_size=decoder.vocab_size, has_table=not decoder.tied_embeddings, norm_size=norm_size
            ),
            num_mtp_layers=decoder.num_mtp_layers,
            decoder=decoder,
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether the keys of a plain decoder say all of the model."""
        return self.decoder is not None and not self.towers and self.layers == self.decoder.layers()

    @property
    def masks(self) -> tuple[Mask, ...]:
        """Mask of the attention of every layer of a decoder [L]."""
        return tuple(next(block.mask for block in layer if isinstance(block, _MASKED)) for layer in self.layers)

    def with_masks(self, masks: Sequence[Mask]) -> ModelSpec:
        """Return a decoder whose layers have these masks [L]."""
        layers = [
            tuple(replace(block, mask=mask) if isinstance(block, _MASKED) else block for block in layer)
            for layer, mask in zip(self.layers, masks, strict=True)
        ]
        return replace(self, layers=tuple(layers))

    @property
    def plain(self) -> Decoder:
        """Keys of the plain decoder; those of a model with windows are as if it had none.

        Raises:
            ConfigError: the model has blocks that a plain decoder has not.
        """
        if self.decoder is None:
            kinds = sorted({block.label for layer in self.layers for block in layer})
            raise ConfigError(
                f"needs a model of one kind of attention, with MLPs or experts, and {self.name} has {', '.join(kinds)}",
                key="model",
                value=self.name,
            )
        return self.decoder

    def changed(self, **keys: Any) -> ModelSpec:
        """Return the model with other keys of a plain decoder, which it has to be."""
        assert self.is_plain, "masks would be lost"
        return ModelSpec.of(replace(self.plain, **keys))

    def __hash__(self) -> int:
        """Hash the model once."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(
            (
                *(self.name, self.source, self.layers, self.embedding, self.head),
                *(self.num_mtp_layers, self.mtp_layer, self.towers),
            )
        )

    # Blocks and pieces

    @cached_property
    def prediction(self) -> Layer:
        """Blocks of one multi-token prediction module; none where the model has no such modules."""
        if not self.num_mtp_layers:
            return ()
        size = self.head.norm_size
        join = PredictionJoin(hidden_size=self.hidden_size, norm_size=size)
        return (join, *(self.mtp_layer or self.layers[-1]), replace(self.head, has_table=False))

    @cached_property
    def blocks(self) -> tuple[AbstractBlock, ...]:
        """Distinct blocks [B]: mixers, MLPs, experts, parts of towers, and the ends."""
        rows: list[Layer] = [*self.layers, *(tower.parts for tower in self.towers), self.prediction]
        distinct = list(dict.fromkeys(block for row in rows for block in row))
        order = (*LAYER_FAMILIES, Family.TOWER, Family.HEAD)
        in_layers = sorted(distinct, key=lambda block: order.index(block.family))
        return (*(block for block in in_layers if block != self.head), self.embedding, self.head)

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks [B]; of several with one label the second ends with 2, and so on."""
        seen: dict[str, int] = {}
        names = dict[int, str]()
        # the head of the main model is named first
        for at in sorted(range(len(self.blocks)), key=lambda at: self.blocks[at] != self.head):
            label = self.blocks[at].label
            seen[label] = seen.get(label, 0) + 1
            names[at] = label if seen[label] == 1 else f"{label}_{seen[label]}"
        return tuple(names[at] for at in range(len(self.blocks)))

    @cached_property
    def planned_names(self) -> tuple[str, ...]:
        """Names under which plans know the blocks [B]; empty for prediction modules' own."""
        planned = {block for layer in self.layers for block in layer} | {self.embedding, self.head}
        return tuple(
            name if block in planned else "" for block, name in zip(self.blocks, self.block_names, strict=True)
        )

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Pieces [P]: kinds of layers, those with experts last, towers, a prediction module, embedding and head."""
        place = {block: at for at, block in enumerate(self.blocks)}
        kinds = sorted(dict.fromkeys(self.layers), key=_has_experts)
        named = [_name_of(kind) for kind in kinds]
        found: list[Piece] = []
        for kind, name in zip(kinds, named, strict=True):
            told = f"{name}: {', '.join(block.label for block in kind)}" if named.count(name) > 1 else name
            same = sum(piece.name.partition(" #")[0] == told for piece in found)
            unique = f"{told} #{same + 1}" if same else told
            found.append(Piece(name=unique, blocks=tuple(place[block] for block in kind), is_layer=True))
        for tower in self.towers:
            parts = tuple(place[part] for part in tower.parts)
            found.append(Piece(name=f"{tower.name} tower", blocks=parts, is_layer=False))
        if self.prediction:
            blocks = tuple(place[block] for block in self.prediction)
            found.append(Piece(name="prediction module", blocks=blocks, is_layer=True))
        ends = {"embedding": len(self.blocks) - 2, "head": len(self.blocks) - 1}
        return (*found, *(Piece(name=name, blocks=(at,), is_layer=False) for name, at in ends.items()))

    @cached_property
    def tower_pieces(self) -> list[int]:
        """Positions in `pieces` of the towers."""
        first = len(self.pieces) - 2 - bool(self.prediction) - len(self.towers)
        return list(range(first, first + len(self.towers)))

    @cached_property
    def piece_of_layer(self) -> IntArray:
        """Position in `pieces` of the kind of every layer [L]."""
        place = {piece.blocks: at for at, piece in enumerate(self.pieces) if piece.is_layer}
        at = {block: number for number, block in enumerate(self.blocks)}
        return np.array([place[tuple(at[block] for block in layer)] for layer in self.layers], dtype=np.int64)

    @cached_property
    def blocks_of_piece(self) -> FloatArray:
        """Number of each block in every piece [P, B]."""
        found = np.zeros((len(self.pieces), len(self.blocks)))
        for at, piece in enumerate(self.pieces):
            np.add.at(found[at], list(piece.blocks), 1.0)
        return found

    @cached_property
    def is_layer_piece(self) -> NDArray[np.bool_]:
        """Whether each piece counts as a layer [P]."""
        return np.array([piece.is_layer for piece in self.pieces])

    @cached_property
    def is_layer_block(self) -> NDArray[np.bool_]:
        """Whether each block belongs to layers [B]."""
        return np.array([block.family in LAYER_FAMILIES for block in self.blocks])

    @cached_property
    def mean_layer(self) -> FloatArray:
        """Share of each piece in the layers [P]."""
        return np.bincount(self.piece_of_layer, minlength=len(self.pieces)) / self.num_layers

    @cached_property
    def mixers_beside(self) -> FloatArray:
        """Mean number of each mixer in the layers that hold a block [B, B]; experts run beside its products."""
        mixers = np.array([block.family is Family.MIXER for block in self.blocks])
        number = np.bincount(self.piece_of_layer, minlength=len(self.pieces)).astype(np.float64)
        if self.prediction:
            number[-3] = self.num_mtp_layers
        holds = self.blocks_of_piece
        together = (holds * number[:, None]).T @ (holds * mixers)
        total = (holds * number[:, None]).sum(axis=0)
        return np.asarray(together / np.maximum(total, 1.0)[:, None])

    # Sizes

    @property
    def num_layers(self) -> int:
        """Layers of the main model, without no-op padding and without multi-token prediction modules."""
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, with the padding of the published checkpoint."""
        return self.embedding.vocab_size

    @property
    def learned_positions(self) -> int:
        """Rows of a learned position table; 0 without one."""
        return self.embedding.learned_positions

    def sizes(self, role: str) -> tuple[int, ...]:
        """Return the distinct sizes of the blocks in a role (`AbstractBlock.sizes`), ascending."""
        return tuple(sorted({block.sizes()[role] for block in self.blocks if role in block.sizes()}))

    @property
    def gated_ffn(self) -> bool:
        """Whether some MLP or expert is gated."""
        return any(isinstance(block, (DenseMlp, Experts)) and block.gated for block in self.blocks)

    @cached_property
    def experts(self) -> Experts | None:
        """Experts of the first layer that has some; None in a dense model."""
        found = (block for layer in self.layers for block in layer if isinstance(block, Experts))
        return next(found, None)

    @property
    def is_moe(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.num_experts > 0

    @property
    def num_experts(self) -> int:
        """Routed experts of one layer; 0 in a dense model."""
        return max(self.sizes("experts"), default=0)

    @property
    def top_k(self) -> int:
        """Routed experts that one token visits; 0 in a dense model."""
        return max(self.sizes("top_k"), default=0)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the main model without MTP modules, as model cards quote them (671 billion for DeepSeek-V3)."""
        return sum(block.parameters for block in self._main_blocks())

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses, with embedding and head, as model cards of MoE models quote them."""
        return sum(block.active_parameters for block in self._main_blocks())

    def _main_blocks(self) -> list[AbstractBlock]:
        rows: list[Layer] = [*self.layers, *(tower.parts for tower in self.towers)]
        return [*(block for row in rows for block in row), self.embedding, self.head]

    def model_flops_per_token(self, sequence_length: float) -> float:
        """Return the model FLOPs of one token's forward and backward pass, 6 N + 12 L h s, as `mfu` counts them.

        N are the active parameters without the embedding tables but with the output head, also where it is tied.
        The attention term is exact for heads of any size: 6 L s * (width of queries + width of values).

        Source: PaLM, arXiv 2204.02311, appendix B. As there and in the measured MFU of Megatron and nanotron, causal
        attention is not halved; of a sliding window only the keys that it holds count. Multi-token prediction modules
        count with their heads (Megatron-LM training.py, num_floating_point_operations), recomputation does not.
        """
        every = [*self.layers, *(self.prediction for _ in range(self.num_mtp_layers))]
        counted = [block for layer in every for block in layer]
        matrices = sum(block.active_parameters for block in counted) + self.head.copied
        matrices += self.embedding.multiplied
        mixing = float(sum(block.mixing_flops(sequence_length) for block in counted))
        heads: float = (1 + self.num_mtp_layers) * self.head.table
        if self.head.is_pooled:
            heads = heads / sequence_length
        return 6 * (matrices + heads) + 3 * mixing


def _has_experts(layer: Layer) -> bool:
    return any(block.family is Family.EXPERTS for block in layer)


def _name_of(layer: Layer) -> str:
    return "layer with experts" if _has_experts(layer) else "dense layer"


def plain_model(**keys: Any) -> ModelSpec:
    """Return the model of a plain decoder with these keys of `Decoder`.

    Raises:
        ConfigError: a size is no count in its range, or two sizes contradict each other.
    """
    return ModelSpec.of(Decoder(**keys))
