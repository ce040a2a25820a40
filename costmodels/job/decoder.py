"""Keys of a plain decoder: one kind of attention, and MLPs of which some may be experts.

Most models are such decoders, and their files write these keys (docs/models.md). `layers` makes the blocks of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from costmodels.blocks.attention import Attention
from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.experts import Experts
from costmodels.blocks.latent_attention import LatentAttention
from costmodels.blocks.mask import Mask
from hardware.io.errors import ConfigError, did_you_mean

Norm = Literal["rms", "layer"]

MAX_LAYERS = 10_000
"""Most layers of a model, ten times as many as the deepest transformers have; data per layer stays small."""
MAX_COUNT = 2**31 - 1  # far above any size of a model; products of three still fit a float64 exponent


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """One decoder-only transformer: dense or mixture of experts; multi-head, grouped-query or latent attention.

    Raises:
        ConfigError: a size is no count in its range, or two sizes contradict each other.
    """

    name: str
    """Name of the model in reports."""
    source: str
    """Publication of the sizes."""
    assumed: tuple[str, ...] = ()
    """Names of the fields that no public source states."""

    num_layers: int
    """Decoder layers of the main model, without no-op padding and without multi-token prediction modules."""
    hidden_size: int
    vocab_size: int
    """Rows of the embedding table, with the padding of the published checkpoint."""
    tied_embeddings: bool
    """Whether the output head is the embedding table."""
    learned_positions: int = 0
    """Rows of a learned position table; 0 with rotary positions."""
    norm: Norm
    """Kind of norms: `rms` has a weight, `layer` a weight and a bias."""
    norms_per_layer: int = 2
    """Norms of one layer over the hidden size: usually 2, or 4 where the outputs of attention and MLP have norms too
    (Gemma 2 and 3, Pangu Ultra)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of one query and of one key head; with MLA, qk_nope_head_dim + qk_rope_head_dim."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases; with MLA, whether the two down projections have."""
    attention_output_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is normalised, with one weight of head_dim for all heads (Qwen3, Gemma 3)."""
    causal: bool = True

    ffn_size: int
    """Inner size of the MLP of a dense layer; unused where every layer is MoE."""
    gated_ffn: bool
    """Whether an MLP has three matrices (SwiGLU, GeGLU) instead of two."""
    mlp_bias: bool = False

    num_experts: int = 0
    """Routed experts of a MoE layer; 0 for a dense model, where every other MoE field has its default."""
    top_k: int = 0
    """Routed experts that one token visits."""
    expert_ffn_size: int = 0
    """Inner size of one routed expert."""
    num_shared_experts: int = 0
    shared_expert_ffn_size: int = 0
    """Inner size of all shared experts together."""
    shared_expert_gate: bool = False
    """Whether a learned gate scales the shared experts' output (Qwen2-MoE)."""
    router_bias: bool = False
    """Whether the router has a bias that balances the load; it is no parameter, because no gradient trains it
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    num_dense_layers: int = 0
    """Number of first layers that are dense although the model is MoE."""
    moe_layer_period: int = 1
    """Period of MoE layers: after the dense layers, layer i (counted from 0) is MoE where i + 1 is a multiple."""

    q_lora_rank: int = 0
    """Rank of the query projection of multi-head latent attention (MLA); 0 where queries are projected directly."""
    kv_lora_rank: int = 0
    """Rank of the joint key and value projection of MLA; 0 for a model without MLA."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    """Size of one value head with MLA; 0 without MLA, where a value has head_dim."""

    num_mtp_layers: int = 0
    """Multi-token prediction modules (DeepSeek-V3), each with a layer like the last one."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_attention(self)
        _check_experts(self)

    @property
    def is_moe(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.num_experts > 0

    @property
    def uses_mla(self) -> bool:
        """Whether attention is DeepSeek's multi-head latent attention."""
        return self.kv_lora_rank > 0

    def is_moe_layer(self, index: int) -> bool:
        """Check whether layer `index`, counted from 0, is MoE."""
        assert 0 <= index < self.num_layers, f"layer {index} of {self.num_layers}"
        return self.is_moe and index >= self.num_dense_layers and (index + 1) % self.moe_layer_period == 0

    @property
    def norm_size(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def value_head_dim(self) -> int:
        """Size of one value head."""
        return self.v_head_dim if self.uses_mla else self.head_dim

    @property
    def context_size(self) -> int:
        """Width of the input of attention's output projection."""
        return self.num_heads * self.value_head_dim

    def attention(self) -> AbstractBlock:
        """Return the attention of every layer, with half of the layer's norms."""
        own: dict[str, Any] = {"norms": self.norms_per_layer / 2, "norm_size": self.norm_size}
        own |= {"rotary": not self.learned_positions}
        own |= {"mask": Mask(causal=self.causal), "output_bias": self.attention_output_bias}
        own |= {"hidden_size": self.hidden_size, "num_heads": self.num_heads}
        if self.uses_mla:
            ranks = {name: getattr(self, name) for name in ("q_lora_rank", "kv_lora_rank", *_MLA_FIELDS[1:])}
            return LatentAttention(**own, **ranks, down_bias=self.qkv_bias)
        return Attention(
            **own,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            qk_norm_size=self.qk_norm * 2 * self.head_dim,
        )

    def _mlp(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "gated": self.gated_ffn,
            "bias": self.mlp_bias,
            "norms": self.norms_per_layer / 2,
            "norm_size": self.norm_size,
        }

    def dense_mlp(self) -> DenseMlp:
        """Return the MLP of a dense layer."""
        return DenseMlp(**self._mlp(), ffn_size=self.ffn_size)

    def experts(self) -> Experts:
        """Return the experts of a MoE layer."""
        return Experts(
            **self._mlp(),
            num_experts=self.num_experts,
            top_k=self.top_k,
            ffn_size=self.expert_ffn_size,
            num_shared=self.num_shared_experts,
            shared_ffn_size=self.shared_expert_ffn_size,
            shared_gate=self.shared_expert_gate,
        )

    def layers(self) -> tuple[tuple[AbstractBlock, ...], ...]:
        """Return the blocks of every layer."""
        mixer, mlp = self.attention(), self.dense_mlp()
        experts = self.experts() if self.is_moe else mlp
        return tuple((mixer, experts if self.is_moe_layer(layer) else mlp) for layer in range(self.num_layers))


_AT_LEAST_ONE = {
    "num_layers",
    "hidden_size",
    "vocab_size",
    "norms_per_layer",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_size",
    "moe_layer_period",
}
_MOE_FIELDS = (
    "top_k",
    "expert_ffn_size",
    "num_shared_experts",
    "shared_expert_ffn_size",
    "shared_expert_gate",
    "router_bias",
    "num_dense_layers",
)
_MLA_FIELDS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_count(value: object, *, key: str, minimum: int = 1, most: int = MAX_COUNT) -> int:
    """Return `value` if it is a whole number in the range of sizes.

    Raises:
        ConfigError: it is none; the error names `key`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= most:
        return value
    raise ConfigError(f"must be a whole number from {minimum} to {most}", key=key, value=value)


def _check_types(spec: Decoder) -> None:
    known = {field.name: field.type for field in fields(spec)}  # annotations are text in this module
    for name, kind in known.items():
        value = getattr(spec, name)
        if kind == "int":
            most = MAX_LAYERS if name == "num_layers" else MAX_COUNT
            check_count(value, key=name, minimum=1 if name in _AT_LEAST_ONE else 0, most=most)
        elif kind == "bool" and not isinstance(value, bool):
            raise ConfigError("must be true or false", key=name, value=value)
        elif kind == "str" and not (isinstance(value, str) and value.strip()):
            raise ConfigError("must be text", key=name, value=value)
    if spec.norm not in get_args(Norm):
        raise ConfigError("unknown norm", key="norm", value=spec.norm, nearest=did_you_mean(spec.norm, get_args(Norm)))
    for name in spec.assumed:
        if name not in known:
            raise ConfigError("names no field of a model", key="assumed", value=name, nearest=did_you_mean(name, known))


def _check_attention(spec: Decoder) -> None:
    if spec.num_heads % spec.num_kv_heads:
        nearest = f"nearest: {_nearest_divisor(spec.num_heads, spec.num_kv_heads)}"
        raise _refusal(spec, "num_kv_heads", f"must divide the model's {spec.num_heads} attention heads", nearest)
    if not spec.uses_mla:
        _check_unused(spec, _MLA_FIELDS, switch="kv_lora_rank")
        return
    for name in _MLA_FIELDS[1:]:
        check_count(getattr(spec, name), key=name)
    width = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    if spec.head_dim != width:
        rule = "must be qk_nope_head_dim + qk_rope_head_dim with latent attention (kv_lora_rank > 0)"
        raise _refusal(spec, "head_dim", rule, f"valid: {width}")
    if spec.num_kv_heads != spec.num_heads:
        rule = "must equal the attention heads with latent attention (kv_lora_rank > 0)"
        raise _refusal(spec, "num_kv_heads", rule, f"valid: {spec.num_heads}")


def _check_experts(spec: Decoder) -> None:
    if not spec.is_moe:
        _check_unused(spec, _MOE_FIELDS, switch="num_experts")
        return
    for name in ("top_k", "expert_ffn_size"):
        check_count(getattr(spec, name), key=name)
    if spec.top_k > spec.num_experts:
        raise _refusal(spec, "top_k", "must not exceed the number of experts", f"at most {spec.num_experts}")
    if bool(spec.num_shared_experts) != bool(spec.shared_expert_ffn_size):
        rule = f"must be above 0 exactly where num_shared_experts ({spec.num_shared_experts}) is"
        raise _refusal(spec, "shared_expert_ffn_size", rule)
    if spec.moe_layer_period > spec.num_layers:
        rule = f"must not exceed the {spec.num_layers} layers"
        raise _refusal(spec, "moe_layer_period", rule, f"at most {spec.num_layers}")
    last_moe_layer = spec.num_layers // spec.moe_layer_period * spec.moe_layer_period - 1
    if spec.num_dense_layers > last_moe_layer:
        rule = f"must leave at least one of the {spec.num_layers} layers to the experts"
        raise _refusal(spec, "num_dense_layers", rule, f"at most {last_moe_layer}")


def _check_unused(spec: Decoder, names: tuple[str, ...], *, switch: str) -> None:
    for name in names:
        if getattr(spec, name):
            raise _refusal(spec, name, f"has a meaning only where {switch} is above 0")


def _refusal(spec: Decoder, name: str, rule: str, nearest: str | None = None) -> ConfigError:
    return ConfigError(rule, key=name, value=getattr(spec, name), nearest=nearest)


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the largest divisor of `number` below `wanted`, which is no divisor itself."""
    return next(divisor for divisor in range(min(wanted, number), 0, -1) if number % divisor == 0)
