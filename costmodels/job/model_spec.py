"""Sizes of one decoder-only transformer, and the parameters and FLOPs that follow from them.

Letters: h = hidden_size, L = num_layers, s = sequence length [tokens], N = parameters that a token meets in matrices.
All counts are exact integers of whole, unsharded tensors, independent of bytes, devices and parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from hardware.io.errors import ConfigError, did_you_mean

Norm = Literal["rms", "layer"]

MAX_LAYERS = 10_000
"""Most layers of a model, ten times as many as the deepest transformers have; data per layer stays small."""
MAX_COUNT = 2**31 - 1  # far above any size of a model; products of three still fit a float64 exponent


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
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
    """Multi-token prediction modules (DeepSeek-V3), whose parameters and FLOPs are not counted."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_attention(self)
        _check_experts(self)

    # What kind of model this is

    @property
    def is_moe(self) -> bool:
        """Whether some layers route tokens to experts."""
        return self.num_experts > 0

    @property
    def uses_mla(self) -> bool:
        """Whether attention is DeepSeek's multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def num_moe_layers(self) -> int:
        """Number of layers for which `is_moe_layer` holds."""
        if not self.is_moe:
            return 0
        return self.num_layers // self.moe_layer_period - self.num_dense_layers // self.moe_layer_period

    def is_moe_layer(self, index: int) -> bool:
        """Check whether layer `index`, counted from 0, is MoE."""
        assert 0 <= index < self.num_layers, f"layer {index} of {self.num_layers}"
        return self.is_moe and index >= self.num_dense_layers and (index + 1) % self.moe_layer_period == 0

    # Widths of one token's activations

    @property
    def q_size(self) -> int:
        """Width of the queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys; also of the values, except with MLA."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Size of one value head."""
        return self.v_head_dim if self.uses_mla else self.head_dim

    @property
    def context_size(self) -> int:
        """Width of the input of attention's output projection."""
        return self.num_heads * self.value_head_dim

    # Parameters of the parts

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: projections, their biases, and the norms inside attention."""
        h = self.hidden_size
        projections = self._latent_projections() if self.uses_mla else self._direct_projections()
        output = self.context_size * h + (h if self.attention_output_bias else 0)
        qk_norms = 2 * self.head_dim if self.qk_norm else 0
        return projections + output + qk_norms

    def _direct_projections(self) -> int:
        width = self.q_size + 2 * self.kv_size
        return self.hidden_size * width + (width if self.qkv_bias else 0)

    def _latent_projections(self) -> int:
        """Count projections down to the ranks, their norms, and up (DeepSeek-V2, arXiv 2405.04434, 2.1, appendix C)."""
        kv_down = self.kv_lora_rank + self.qk_rope_head_dim
        kv_up = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        keys_values = self.hidden_size * kv_down + self.kv_lora_rank + self.kv_lora_rank * kv_up
        biases = self.q_lora_rank + kv_down if self.qkv_bias else 0
        if not self.q_lora_rank:
            return self.hidden_size * self.q_size + keys_values + biases
        queries = self.hidden_size * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * self.q_size
        return queries + keys_values + biases

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of the MLP of one dense layer."""
        return self._mlp_parameters(self.ffn_size)

    @property
    def router_parameters(self) -> int:
        """Parameters of one MoE layer's router."""
        return self.num_experts * (self.hidden_size + (1 if self.router_bias else 0))

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return self._mlp_parameters(self.expert_ffn_size) if self.is_moe else 0

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of all shared experts of one MoE layer together, with their gate."""
        if not self.num_shared_experts:
            return 0
        return self._mlp_parameters(self.shared_expert_ffn_size) + (self.hidden_size if self.shared_expert_gate else 0)

    def _mlp_parameters(self, inner: int) -> int:
        inputs = 2 if self.gated_ffn else 1
        biases = inputs * inner + self.hidden_size if self.mlp_bias else 0
        return (inputs + 1) * self.hidden_size * inner + biases

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm before the output head, or of any other single norm over the hidden size."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one layer's norms over the hidden size."""
        return self.norms_per_layer * self.final_norm_parameters

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one dense layer."""
        return self.attention_parameters + self.dense_mlp_parameters + self.norm_parameters

    @property
    def moe_layer_parameters(self) -> int:
        """Parameters of one MoE layer with all its experts; 0 in a dense model."""
        return self._moe_layer_parameters(self.num_experts)

    @property
    def moe_layer_active_parameters(self) -> int:
        """Parameters of one MoE layer that one token uses; 0 in a dense model."""
        return self._moe_layer_parameters(self.top_k)

    def _moe_layer_parameters(self, num_experts: int) -> int:
        if not self.is_moe:
            return 0
        experts = num_experts * self.expert_parameters + self.shared_expert_parameters
        return self.attention_parameters + self.router_parameters + experts + self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one token table of vocab_size rows."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        """Parameters of the learned position table."""
        return self.learned_positions * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head; 0 where it is the embedding table."""
        return 0 if self.tied_embeddings else self.embedding_parameters

    # Parameters of the whole

    @property
    def num_parameters(self) -> int:
        """Parameters of the main model without MTP modules, as model cards quote them (671 billion for DeepSeek-V3)."""
        return self._model_parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses, with embedding and head, as model cards of MoE models quote them."""
        return self._model_parameters(self.top_k)

    def _model_parameters(self, experts_per_layer: int) -> int:
        dense = (self.num_layers - self.num_moe_layers) * self.dense_layer_parameters
        moe = self.num_moe_layers * self._moe_layer_parameters(experts_per_layer)
        tables = self.embedding_parameters + self.position_parameters + self.head_parameters
        return tables + dense + moe + self.final_norm_parameters

    def model_flops_per_token(self, sequence_length: float) -> float:
        """Return the model FLOPs of one token's forward and backward pass, 6 N + 12 L h s, as `mfu` counts them.

        N are the active parameters without the embedding tables but with the output head, also where it is tied.
        The attention term is exact for heads of any size: 6 L s * (width of queries + width of values).

        Source: PaLM, arXiv 2204.02311, appendix B. As there and in the measured MFU of Megatron and nanotron, causal
        attention is not halved, and a sliding window is not taken off. MTP modules and recomputation do not count.
        """
        tables = self.embedding_parameters + self.position_parameters + self.head_parameters
        matrices = self.num_active_parameters - tables + self.embedding_parameters
        attention = self.num_layers * sequence_length * (self.q_size + self.context_size)
        return 6 * (matrices + attention)


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


def _check_types(spec: ModelSpec) -> None:
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


def _check_attention(spec: ModelSpec) -> None:
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


def _check_experts(spec: ModelSpec) -> None:
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


def _check_unused(spec: ModelSpec, names: tuple[str, ...], *, switch: str) -> None:
    for name in names:
        if getattr(spec, name):
            raise _refusal(spec, name, f"has a meaning only where {switch} is above 0")


def _refusal(spec: ModelSpec, name: str, rule: str, nearest: str | None = None) -> ConfigError:
    return ConfigError(rule, key=name, value=getattr(spec, name), nearest=nearest)


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the largest divisor of `number` below `wanted`, which is no divisor itself."""
    return next(divisor for divisor in range(min(wanted, number), 0, -1) if number % divisor == 0)
