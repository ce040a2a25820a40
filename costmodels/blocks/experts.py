"""Mixture of experts with its norm, router and residual: routed experts, and shared ones that every token visits.

Sources: Shazeer et al. 2017; GShard, Lepikhin et al. 2020, for the exchange of tokens; DeepSeekMoE, Dai et al. 2024,
for shared experts; megatron-core moe/experts.py and moe/token_dispatcher.py for what is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.dense_mlp import add_mlp, mlp_operators, mlp_parameters
from costmodels.blocks.graph import HIDDEN, ROWS, BlockGraph, enter, leave
from costmodels.blocks.matrix import Matrix, mlp_matrices
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray

ROUTED_COPIES = 4
"""Copies of the routed tokens' gradient that are alive at once while experts run backward: combined, permuted,
exchanged, and sorted by expert (megatron-core moe/token_dispatcher.py, alltoall dispatcher)."""


_LARGEST_SURPLUS = 8
"""Slots are rounded up by less than an eighth, so that the sequence can be partitioned further (assumed)."""


def slots_per_expert(sequence_length: int, *, top_k: int, num_experts: int) -> int:
    """Return the number of slots that one expert has for the tokens of one sequence.

    It is the balanced share, rounded up to a multiple of a divisor of the sequence length, so that slots and sequence
    divide into many common chunks.
    """
    # Balanced share of one expert, rounded up.
    share = -(-sequence_length * top_k // num_experts)
    # Largest divisor of the sequence length that adds less than an eighth to the share.
    multiple = max(each for each in range(1, max(share // _LARGEST_SURPLUS, 1) + 1) if sequence_length % each == 0)
    return -(-share // multiple) * multiple


def slot_sizes(sequence_length: int, *, top_k: int, num_experts: int) -> dict[str, int]:
    """Return the sizes of the factors that divide a sequence and its slots into chunks, by name."""
    slots = slots_per_expert(sequence_length, top_k=top_k, num_experts=num_experts)
    # Tokens and slots of a chunk must both be whole numbers, so the chunks are their greatest common divisor.
    chunks = math.gcd(sequence_length, slots)
    return {"slots": slots, "chunks": chunks, "chunk_tokens": sequence_length // chunks, "chunk_slots": slots // chunks}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(AbstractBlock):
    """Mixture of experts.

    Attributes:
        hidden_size: Width of a token.
        num_experts: Routed experts.
        top_k: Routed experts that one token visits.
        ffn_size: Inner size of one routed expert.
        gated: Whether an expert has three matrices instead of two.
        bias: Whether an expert's matrices have biases.
        num_shared: Shared experts.
        shared_ffn_size: Inner size of all shared experts together.
        shared_gate: Whether a learned gate scales the shared experts' output (Qwen2-MoE).
        router_bias: Whether the router has a trained bias for each expert (gpt-oss).
        latent_size: Width to which tokens are projected for the routed experts, and back; 0 without (Nemotron 3 Super).
        idle_experts: Further experts of the router that compute nothing (LongCat-Flash).
        norms: Norms over the hidden size that belong to the block.
        norm_size: Parameters of one such norm.
    """

    kind: ClassVar[str] = "experts"
    family: ClassVar[Family] = Family.EXPERTS

    hidden_size: int
    num_experts: int
    top_k: int
    ffn_size: int
    gated: bool
    bias: bool = False
    num_shared: int = 0
    shared_ffn_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    latent_size: int = 0
    idle_experts: int = 0
    norms: float = 1.0
    norm_size: int

    @property
    def label(self) -> str:
        """Word for the block in the names of operators."""
        return "moe_mlp"

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return mlp_parameters(self.width, self.ffn_size, gated=self.gated, bias=self.bias)

    @property
    def width(self) -> int:
        """Width of the tokens that routed experts see."""
        return self.latent_size or self.hidden_size

    @property
    def router_parameters(self) -> int:
        """Parameters of the router, and of the projections to the experts' width and back."""
        routed = (self.num_experts + self.idle_experts) * (self.hidden_size + (1 if self.router_bias else 0))
        return routed + 2 * self.hidden_size * self.latent_size

    @property
    def mean_visits(self) -> float:
        """Mean number of experts that compute for a token, if the router chooses evenly."""
        return self.top_k * self.num_experts / (self.num_experts + self.idle_experts)

    @property
    def shared_parameters(self) -> int:
        """Parameters of all shared experts together, with their gate."""
        if not self.num_shared:
            return 0
        shared = mlp_parameters(self.hidden_size, self.shared_ffn_size, gated=self.gated, bias=self.bias)
        return shared + (self.hidden_size if self.shared_gate else 0)

    def _parameters(self, experts: int) -> int:
        norms = round(self.norms * self.norm_size)
        return experts * self.expert_parameters + self.shared_parameters + self.router_parameters + norms

    @property
    def parameters(self) -> int:
        """Parameters of all experts, the router and the norms."""
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: those of top_k experts."""
        return self._parameters(round(self.mean_visits))

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: ep and expert_tp divide experts, routers and norms are copied."""
        tp = degrees.tp.astype(np.float64)
        dense = self.shared_parameters / tp + self.router_parameters + self.norms * self.norm_size
        expert = self.num_experts * self.expert_parameters / (degrees.expert_tensor * degrees.ep)
        return HeldParameters(
            dense=dense, expert=expert, one_expert=expert / np.maximum(self.num_experts / degrees.ep, 1.0)
        )

    def routed(self, context: BlockContext) -> FloatArray:
        """Return the rows that one rank's experts multiply for one micro-batch, with balanced experts [u].

        There are top_k rows for each of the tokens gathered from the ranks that share its experts.
        """
        return context.residual * self.mean_visits * context.expert_ranks

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the norm, the router, the experts' grouped products, the shared experts and the residual."""
        context, hidden, build = build.context, self.hidden_size, build.of_module("moe")
        degrees, routed = context.degrees, self.routed(context)
        # the experts of one rank are one grouped product: ep deals out whole experts, expert_tp cuts their inner size
        groups, ffn = self.num_experts / degrees.ep, self.ffn_size / degrees.expert_tensor
        operators = build.norm(hidden, norms=self.norms)
        every, width = self.num_experts + self.idle_experts, self.width
        operators += build.matmul("router", context.residual, hidden, every, is_wide=True)
        if self.latent_size:
            operators += build.matmul("latent_down", context.residual, hidden, width)
        operators += build.elementwise("permute", 2 * routed * width, 2, 2)
        operators += build.matmul("up", routed, width, ffn * (1 + self.gated), groups=groups)
        operators += build.of_module("moe_act").activation("activation", routed * ffn, gated=self.gated)
        operators += build.matmul("down", routed, ffn, width, groups=groups)
        if self.latent_size:
            operators += build.matmul("latent_up", context.residual, width, hidden)
        if self.shared_ffn_size:
            shared, inner = build.of_module("shared_experts"), self.shared_ffn_size / degrees.tp
            operators += mlp_operators(shared, "shared.", context.tokens, hidden, inner, gated=self.gated)
        return operators + build.add_residual(hidden)

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the norm, the router, and each expert's input and inner values for the tokens that are routed to it.

        A routed token's weight scales the inner values, so no output is kept (megatron-core moe/experts.py). Only a
        gated activation is fused with that scaling (fusions/fused_bias_swiglu.py). Others keep the values before and
        after it.
        """
        context, width, degrees = tally.context, tally.width, tally.context.degrees
        routed = self.routed(context)
        inputs = width * routed * self.width * tally.input_share
        first, last = tally.mlp(routed, self.ffn_size / degrees.expert_tensor, gated=self.gated)
        if not self.gated:
            last = 2 * last
        shared_first, shared_last = tally.mlp(tally.tokens, self.shared_ffn_size / degrees.tp, gated=self.gated)
        # The router runs in fp32 on the ranks' own shares of the tokens.
        router = 8 * tally.residual * self.num_experts  # scores and probabilities in fp32
        experts = router + inputs + first + last
        shared = shared_first + shared_last + tally.kept_shared * bool(self.shared_ffn_size)
        dropped = np.zeros_like(experts)
        # Dropping the whole MoE module keeps its inputs alone. Otherwise its parts are dropped one by one.
        if context.facts.selective_products:
            # what the experts' exchanges delivered, both ways, and the shared experts' products
            exchanged = np.where(degrees.ep > 1, 2 * inputs, 0.0)
            products = exchanged + tally.second_products(shared_first, gated=self.gated) + tally.scattered
            whole = (1 + tally.input_share) * tally.hidden + experts + shared
            dropped = np.maximum(whole - products, 0.0)
        elif tally.drops("moe"):
            dropped = dropped + experts + shared_first + shared_last
        else:
            dropped = (
                dropped + tally.drops("moe_act") * last + tally.drops("shared_experts") * (shared_first + shared_last)
            )
        if tally.drops("layernorm") and not context.facts.selective_products:
            dropped = dropped + tally.hidden
        return BlockMemory(
            kept=(1 + tally.input_share) * tally.hidden + experts + shared,
            dropped=dropped,
            gradient=tally.hidden + first + ROUTED_COPIES * inputs,
        )

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return the routed rows; shared experts gather and scatter over tp like a dense MLP."""
        return Exchanges(
            tensor=bool(self.shared_ffn_size),
            routed=self.routed(context),
            visits=self.mean_visits,
            routed_width=self.width,
        )

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the router, projections to the experts' width and back, shared experts, and those of every expert."""
        tp, h = degrees.tp.astype(np.float64), self.hidden_size
        found = [Matrix(rows=self.num_experts + self.idle_experts, columns=h, cut="none", ways=tp)]
        if self.latent_size:
            found += [Matrix(rows=self.latent_size, columns=h, cut="none", ways=tp, each=2.0)]
        if self.shared_ffn_size:
            found += mlp_matrices(h, self.shared_ffn_size, tp, gated=self.gated, joins_gate=joins_gate)
        return found + mlp_matrices(
            self.width,
            self.ffn_size,
            degrees.expert_tensor.astype(np.float64),
            gated=self.gated,
            joins_gate=joins_gate,
            each=self.num_experts / degrees.ep,
            part="expert",
        )

    def add_to(self, graph: BlockGraph, x: int) -> int:
        """Add the norm, the router, the experts on their slots, the shared experts, and the residual."""
        every = self.num_experts + self.idle_experts
        scored, width = "scored_experts" if self.idle_experts else "experts", "latent" if self.latent_size else "hidden"
        graph = graph.sized(
            experts=self.num_experts,
            scored_experts=every,
            latent=self.latent_size or 1,
            expert_ffn=self.ffn_size,
            shared_ffn=self.shared_ffn_size or 1,
            **slot_sizes(graph.sequence_length, top_k=self.top_k, num_experts=every),
        )
        normed = enter(self, graph, x)
        weight = (f"{scored} hidden", f"{ROWS} {scored}")
        (logits,) = graph.linear("router", (normed, HIDDEN), {"": weight}, is_wide=True)
        if self.router_bias:
            logits = graph.bias("router_bias", logits, scored)
        weights, tokens = graph.routing("routing", logits, experts=scored), normed
        if self.latent_size:
            (tokens,) = graph.linear("latent_down", (tokens, HIDDEN), {"": ("hidden latent", f"{ROWS} latent")})
        slots = graph.dispatch("dispatch", tokens, weights, width=width)
        slots = add_mlp(
            graph, slots, "expert_ffn", rows="experts batch slots", width=width, gated=self.gated, bias=self.bias
        )
        y = graph.combine("combine", slots, weights, width=width)
        if self.latent_size:
            (y,) = graph.linear("latent_up", (y, f"{ROWS} latent"), {"": ("latent hidden", HIDDEN)})
        if self.num_shared:  # shared experts see every token, without dispatch
            inside = graph.under("shared")
            shared = add_mlp(inside, normed, "shared_ffn", gated=self.gated, bias=self.bias)
            if self.shared_gate:
                (gate,) = inside.linear("gate", (normed, HIDDEN), {"": ("hidden", ROWS)}, is_wide=True)
                shared = inside.scale("scale", shared, gate)
            y = graph.add("sum", (y, shared))
        return leave(self, graph, x, y)

    def sizes(self) -> dict[str, int]:
        """Return the number of experts and the inner sizes."""
        shared = {"ffn": self.shared_ffn_size} if self.shared_ffn_size else {}
        return {"experts": self.num_experts, "top_k": self.top_k, "expert_ffn": self.ffn_size, **shared}
