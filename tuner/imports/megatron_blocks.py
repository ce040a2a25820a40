"""Layers of a Megatron-LM model that are no plain decoder's: windows, sinks, gates, linear and sparse attention.

Sources: megatron-core 0.19.2 transformer/transformer_config.py (window_size, window_attn_skip_freq, softmax_type,
attention_output_gate, linear_*, dsa_*, moe_latent_size), transformer/utils.py (is_layer_window_attention: the layers of
full attention are those whose number, from 1, is a multiple), models/gpt/experimental_attention_variant_module_specs.py
(get_linear_attention_pattern: likewise).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mask import Mask
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.job.model_spec import Layer, ModelSpec
from tuner.export.hybrid_pattern import NET, SPARSE
from tuner.imports.flags import Flags
from tuner.imports.megatron_hybrid import Hybrid
from tuner.imports.megatron_model import expand_pattern

VARIANTS = ("gated_delta_net", "dsa")
"""Values of --experimental-attention-variant that are read."""

Pattern = tuple[bool, ...] | int
"""Layers that are special: one entry for each, or all but every so manieth layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """Sizes of gated delta nets, and the layers that have them."""

    layers: Pattern
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronBlocks:
    """What flags say of layers beyond the keys of a decoder.

    Attributes:
        window: Keys that a query of windowed layers sees; 0 without windows.
        windowed: Layers with windows.
        sinks: Whether each head has a learned sink.
        gate: Whether a gate scales each element of attention's result.
        latent_size: Width of the routed experts' tokens; 0 for that of the model.
        delta_net: Gated delta nets, if some layers have them.
        index_heads: Heads of the indexer of sparse attention; 0 without.
        index_head_dim: Size of one of its heads.
        index_topk: Keys that it chooses.
        hybrid: Layers of a hybrid model, each one block.
    """

    window: int = 0
    windowed: Pattern = ()
    sinks: bool = False
    gate: bool = False
    latent_size: int = 0
    delta_net: DeltaNet | None = None
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    hybrid: Hybrid | None = None

    def apply(self, model: ModelSpec) -> ModelSpec:
        """Return a plain decoder with these layers."""
        if self == MegatronBlocks():
            return model
        if self.hybrid is not None:
            model = self.hybrid.apply(model, {NET: self._net, SPARSE: self._sparse})
        layers = tuple(self._layer(layer, at) for at, layer in enumerate(model.layers))
        mtp_layer = self._layer(model.mtp_layer, model.num_layers - 1)
        is_masked_only = self == MegatronBlocks(window=self.window, windowed=self.windowed)
        decoder = model.decoder if is_masked_only else None
        return replace(model, layers=layers, mtp_layer=mtp_layer, decoder=decoder)

    def _layer(self, layer: Layer, at: int) -> Layer:
        return tuple(self._block(block, at) for block in layer)

    def _block(self, block: AbstractBlock, at: int) -> AbstractBlock:
        if isinstance(block, Experts):
            return replace(block, latent_size=self.latent_size)
        if not isinstance(block, Attention | LatentAttention):
            return block
        if self.hybrid is None and self.delta_net is not None and _has(self.delta_net.layers, at):
            return self._net(block)
        if self.hybrid is None and self.index_heads:
            return self._sparse(block)
        mask = Mask(window=self.window) if self.window and _has(self.windowed, at) else None
        if isinstance(block, Attention):
            size = block.q_size if self.gate else 0
            return replace(block, sinks=self.sinks, gate_size=size, mask=mask or block.mask)
        return replace(block, mask=mask) if mask and not isinstance(block, SparseLatentAttention) else block

    def _net(self, mixer: AbstractBlock) -> AbstractBlock:
        assert isinstance(mixer, Attention | LatentAttention), "the attention of a decoder"
        assert self.delta_net is not None, "read where a layer has a gated delta net"
        net = {field.name: getattr(self.delta_net, field.name) for field in fields(DeltaNet) if field.name != "layers"}
        own: dict[str, Any] = {"hidden_size": mixer.hidden_size, "norms": mixer.norms, "norm_size": mixer.norm_size}
        return GatedDeltaNet(**own, **net)

    def _sparse(self, mixer: AbstractBlock) -> AbstractBlock:
        if not isinstance(mixer, LatentAttention):
            return mixer
        latent: dict[str, Any] = {field.name: getattr(mixer, field.name) for field in fields(mixer)}
        latent |= {"mask": Mask(window=self.index_topk), "index_heads": self.index_heads}
        return SparseLatentAttention(**latent, index_head_dim=self.index_head_dim)


def _has(layers: Pattern, at: int) -> bool:
    """Return whether layer `at`, from 0, is one of the special ones; a number leaves out its multiples, from 1."""
    if isinstance(layers, int):
        return (at + 1) % layers != 0
    return layers[at] if at < len(layers) else True


def blocks_of(flags: Flags, hybrid: Hybrid | None = None) -> MegatronBlocks:
    """Return what the flags say of layers beyond the keys of a decoder; `hybrid` are those of a hybrid model."""
    variant = flags.text("--experimental-attention-variant") or ""
    window, windowed = _window(flags), _pattern(flags, "--window-attn-skip-freq")
    if variant and variant not in VARIANTS:
        flags.doubt("--experimental-attention-variant", f"{variant} is not modelled")
    has_nets, is_sparse = variant == "gated_delta_net", variant == "dsa"
    if hybrid is not None:
        has_nets, is_sparse = (symbol in hybrid.pattern + hybrid.predicting for symbol in (NET, SPARSE))
    return MegatronBlocks(
        window=window,
        windowed=windowed if window else (),
        sinks=flags.text("--softmax-type") == "learnable",
        gate=flags.has("--attention-output-gate"),
        latent_size=flags.count("--moe-latent-size") or 0,
        delta_net=_delta_net(flags) if has_nets else None,
        index_heads=(flags.count("--dsa-indexer-n-heads") or 64) if is_sparse else 0,
        index_head_dim=(flags.count("--dsa-indexer-head-dim") or 128) if is_sparse else 0,
        index_topk=(flags.count("--dsa-indexer-topk") or 2048) if is_sparse else 0,
        hybrid=hybrid,
    )


def _window(flags: Flags) -> int:
    """Return the keys that a query sees: the first number of `--window-size 127,0` and its own, if it is no -1."""
    text = " ".join(flags.words("--window-size"))
    found = re.fullmatch(r"\(?\s*(-?[0-9]{1,9})\s*[,\s]\s*(-?[0-9]{1,9})\s*\)?", text)
    if not text:
        return 0
    if found is None:
        flags.doubt("--window-size", f"{text} is not two numbers")
        return 0
    before = int(found[1])
    return before + 1 if before >= 0 else 0


def _pattern(flags: Flags, name: str) -> Pattern:
    text = (flags.text(name) or "").replace(" ", "")
    if not text:
        return ()
    if re.fullmatch(r"[1-9][0-9]{0,5}", text):
        return int(text)
    pattern = expand_pattern(text) if len(text) <= 1000 else ""
    if not pattern:
        flags.doubt(name, f"{text} is neither a number nor a list of 0 and 1")
    return tuple(digit == "1" for digit in pattern)


def _delta_net(flags: Flags) -> DeltaNet:
    return DeltaNet(
        layers=_pattern(flags, "--linear-attention-freq"),
        num_key_heads=flags.count("--linear-num-key-heads") or 16,
        num_value_heads=flags.count("--linear-num-value-heads") or 32,
        key_head_dim=flags.count("--linear-key-head-dim") or 128,
        value_head_dim=flags.count("--linear-value-head-dim") or 128,
        conv_size=flags.count("--linear-conv-kernel-dim") or 4,
    )
