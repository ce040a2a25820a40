"""Blocks of a transformer on one rank: norms, attention, MLP, embedding and head.

Letters: b sequences, s positions of this rank, h hidden size, d head size. Ranges `@block.role` mark the operators of
costmodels/operators/layer_operators.py in a profile. Ranges `@block.role+` continue the execution that began before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from costmodels.job.decoder import Decoder
from trials.torch_training.model.attention import attend
from trials.torch_training.model.sharding import Layout
from trials.torch_training.model.weights import WeightMaker, cuts_of

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5

Weight = nn.Parameter


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surroundings:
    """Objects that all blocks of a rank share.

    Attributes:
        model: Sizes of the whole model.
        layout: Layout of tensors over the tensor-parallel ranks.
        make: Factory for weights.
        positions: Positions of the tokens that attention sees on this rank [s].
        residual_positions: Positions of the tokens that norms and residuals see [s, or s/tp with sequence parallelism].
        ring: Ranks of this rank's ring; None without context parallelism.
        ulysses: Ranks that share this rank's heads; None without Ulysses.
        recomputes_attention: Whether the backward pass computes the attention core again.
    """

    model: Decoder
    layout: Layout
    make: WeightMaker
    positions: Tensor
    residual_positions: Tensor
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    recomputes_attention: bool

    def matrix(self, name: str, role: str, *shape: int, columns: int = 1) -> Weight:
        """Return this rank's part of a random weight of the whole `shape`, laid out by its role."""
        layout = self.layout
        cuts = cuts_of(layout.sharding.weights[role], layout.index, layout.size)
        return self.make.matrix(name, shape, cuts, columns=columns)

    def vector(self, value: float, role: str, *shape: int) -> Weight:
        """Return this rank's part of a constant weight of the whole `shape`, laid out by its role."""
        layout = self.layout
        return self.make.constant(value, shape, cuts_of(layout.sharding.weights[role], layout.index, layout.size))


class Meeting(NamedTuple):
    """Role of a weight, and role of the activation that it is applied to."""

    weight: str
    activation: str


class Block(nn.Module):
    """Part of a model that knows the roles of its weights; these determine the layout of the gradients.

    Attributes:
        meetings: Roles of each weight and its activation, by the weight's name; expert weights have none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.meetings: dict[str, Meeting] = {}

    def hold(self, name: str, weight: Weight | None, role: str, meets: str) -> None:
        """Register a weight under `name`; None if the model lacks it."""
        self.register_parameter(name, weight)
        if weight is not None:
            self.meetings[name] = Meeting(role, meets)


class Norm(Block):
    """RMSNorm or LayerNorm over the last dim."""

    weight: Weight
    bias: Weight | None

    def __init__(self, own: Surroundings, role: str, size: int, *, meets: str) -> None:
        super().__init__()
        self.hold("weight", own.vector(1.0, role, size), role, meets)
        self.hold("bias", own.vector(0.0, role, size) if own.model.norm == "layer" else None, role, meets)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]."""
        size = (x.shape[-1],)
        if self.bias is None:
            return functional.rms_norm(x, size, self.weight, NORM_EPSILON)
        return functional.layer_norm(x, size, self.weight, self.bias, NORM_EPSILON)


class Attention(Block):
    """Norm, projections, rotary positions, core and output projection, without the residual's addition."""

    qkv: Weight
    qkv_bias: Weight | None
    proj: Weight
    proj_bias: Weight | None
    cosine: Tensor
    sine: Tensor

    def __init__(self, own: Surroundings, name: str) -> None:
        super().__init__()
        model, layout = own.model, own.layout
        self.own = own
        self.kv_heads = model.num_kv_heads // layout.size
        # A group holds the query heads of one key head, the key head and the value head.
        self.per_group = model.num_heads // model.num_kv_heads + 2
        rows = (model.num_kv_heads, self.per_group, model.head_dim)
        self.norm = Norm(own, "norm", model.hidden_size, meets="residual")
        role, meets = "attention.qkv", "attention.input"
        self.hold("qkv", own.matrix(f"{name}.qkv", role, *rows, model.hidden_size), role, meets)
        self.hold("qkv_bias", own.vector(0.0, role, *rows) if model.qkv_bias else None, role, meets)
        head_norm = ("attention.head_norm", model.head_dim)
        self.q_norm = Norm(own, *head_norm, meets="heads") if model.qk_norm else None
        self.k_norm = Norm(own, *head_norm, meets="heads") if model.qk_norm else None
        role = "attention.proj"
        shape = (model.hidden_size, model.context_size)
        self.hold("proj", own.matrix(f"{name}.proj", role, *shape), role, "attention.output")
        role = "attention.proj_bias"
        bias = own.vector(0.0, role, model.hidden_size) if model.attention_output_bias else None
        self.hold("proj_bias", bias, role, "residual")
        if not model.learned_positions:
            angles = _compute_rotary_angles(own.positions, model.head_dim)
            self.register_buffer("cosine", angles.cos(), persistent=False)
            self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output for x [b, s, h] in the residual's layout."""
        own, model = self.own, self.own.model
        with record_function("@attention.norm"):
            x = self.norm(x)
        x = own.layout.move(x, "residual", "attention.input")
        with record_function("@attention.qkv"):
            x = functional.linear(x, self.qkv, self.qkv_bias)
        # Rows of the weight are grouped as in Megatron-LM: the query heads of a key head, then its key and its value.
        x = x.view(*x.shape[:2], self.kv_heads, self.per_group, model.head_dim)
        q = x[..., :-2, :].flatten(2, 3)
        k, v = x[..., -2, :], x[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if not model.learned_positions:
            with record_function("@attention.rotary"):
                q, k = (rotate_pairs(each, self.cosine, self.sine) for each in (q, k))
        if own.recomputes_attention:
            context = checkpoint(self._core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            context = self._core(q, k, v)
        with record_function("@attention.proj"):
            x = functional.linear(context.flatten(2), self.proj)
        x = own.layout.move(x, "attention.output", "residual")
        return x if self.proj_bias is None else x + self.proj_bias

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with record_function("@attention.core"):
            return attend(q, k, v, ring=self.own.ring, ulysses=self.own.ulysses)


class FeedForward(Block):
    """Two products of an MLP with the activation between them, without norm and without the residual's addition."""

    up: Weight
    up_bias: Weight | None
    down: Weight
    down_bias: Weight | None

    def __init__(self, own: Surroundings, name: str, inner_size: int) -> None:
        super().__init__()
        model = own.model
        self.own = own
        # SwiGLU stacks two inputs of the activation in one product; GELU has one.
        self.gates = 1 + int(model.gated_ffn)
        shape = (self.gates, inner_size)
        role, meets = "mlp.up", "mlp.input"
        self.hold("up", own.matrix(f"{name}.up", role, *shape, model.hidden_size), role, meets)
        self.hold("up_bias", own.vector(0.0, role, *shape) if model.mlp_bias else None, role, meets)
        role = "mlp.down"
        self.hold("down", own.matrix(f"{name}.down", role, model.hidden_size, inner_size), role, "mlp.output")
        role = "mlp.down_bias"
        self.hold("down_bias", own.vector(0.0, role, model.hidden_size) if model.mlp_bias else None, role, "residual")

    def forward(self, x: Tensor, role: str) -> Tensor:
        """Compute the output for x [b, s, h] in the residual's layout; `role` names the block in a profile."""
        x = self.own.layout.move(x, "residual", "mlp.input")
        with record_function(f"@{role}.up"):
            x = functional.linear(x, self.up, self.up_bias)
        with record_function(f"@{role}.activation"):
            x = apply_activation(x, self.gates)
        with record_function(f"@{role}.down"):
            x = functional.linear(x, self.down)
        # the bias is added after the sum over the ranks, so that it counts once
        x = self.own.layout.move(x, "mlp.output", "residual")
        return x if self.down_bias is None else x + self.down_bias


class DenseMlp(Block):
    """Norm and MLP of a dense layer, without the residual's addition."""

    def __init__(self, own: Surroundings, name: str) -> None:
        super().__init__()
        self.norm = Norm(own, "norm", own.model.hidden_size, meets="residual")
        self.mlp = FeedForward(own, f"{name}.mlp", own.model.ffn_size)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output for x [b, s, h] in the residual's layout."""
        with record_function("@dense_mlp.norm"):
            x = self.norm(x)
        y: Tensor = self.mlp(x, "dense_mlp")
        return y


class Embedding(Block):
    """Token table, its rows split over the tensor-parallel ranks, and learned positions."""

    tokens: Weight
    positions: Weight | None

    def __init__(self, own: Surroundings) -> None:
        super().__init__()
        model = own.model
        self.own = own
        role = "embedding.tokens"
        self.hold("tokens", own.matrix("table", role, model.vocab_size, model.hidden_size), role, "embedding.output")
        role = "embedding.positions"
        shape = (model.learned_positions, model.hidden_size)
        table = own.matrix("positions", role, *shape) if model.learned_positions else None
        self.hold("positions", table, role, "residual")

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens [b, s]; return [b, s, h] in the residual's layout."""
        own = self.own
        with record_function("@embedding.lookup"):
            # Rows of other ranks yield zeros here; the sum over ranks completes them.
            row = tokens - own.layout.index * self.tokens.shape[0]
            is_here = (row >= 0) & (row < self.tokens.shape[0])
            x = functional.embedding(torch.where(is_here, row, 0), self.tokens)
            # Row 0 stands in for rows of other ranks and must add nothing.
            x = x if own.layout.size == 1 else x * is_here[..., None]
        x = own.layout.move(x, "embedding.output", "residual")
        return x if self.positions is None else x + self.positions[own.residual_positions]


class Head(Block):
    """Final norm and logits."""

    table: Weight

    def __init__(self, own: Surroundings) -> None:
        super().__init__()
        model = own.model
        self.own = own
        self.norm = Norm(own, "norm", model.hidden_size, meets="residual")
        # Equal names give equal values, so a tied head on another stage starts from the embedding's table.
        name = "table" if model.tied_embeddings else "head"
        self.hold("table", own.matrix(name, "head", model.vocab_size, model.hidden_size), "head", "head.input")

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the logits [b, s, v] from x [b, s, h]."""
        with record_function("@head.norm"):
            x = self.norm(x)
        # every rank computes the columns of its rows of the table; the loss joins them
        x = self.own.layout.move(x, "residual", "head.input")
        with record_function("@head.logits"):
            return functional.linear(x, self.table)


def apply_activation(x: Tensor, gates: int) -> Tensor:
    """Apply the activation to x [..., gates * f]; return [..., f].

    With two gates it is the SiLU of the first half times the second half, otherwise GELU.
    """
    if gates == 1:
        return functional.gelu(x)
    gate, value = x.chunk(2, dim=-1)
    return functional.silu(gate) * value


def add_residual(x: Tensor, block: Callable[[Tensor], Tensor], role: str) -> Tensor:
    """Apply a block and add its residual."""
    y = block(x)
    with record_function(f"@{role}.residual"):
        return x + y


def _compute_rotary_angles(positions: Tensor, head_size: int) -> Tensor:
    """Return the angles of the rotary embedding [s, 1, d/2] (RoFormer, Su et al. 2021, section 3.2.2)."""
    # Angle of pair i at position p: p * ROTARY_BASE^(-2i/d); float64 keeps large positions exact.
    steps = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64) / head_size
    return (positions[:, None].double() * ROTARY_BASE**-steps).float()[:, None]


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [b, s, heads, d], where the first half of d is paired with the second half."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
