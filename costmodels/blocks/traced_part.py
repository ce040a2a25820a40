"""Part of a layer that nobody described: its products, attention and passes over memory as a trace counted them.

How frameworks would cut such a part is not known. tp is taken to cut its products as Megatron-LM cuts those that it
knows: the outputs of those that read the hidden values, and the inputs of those that write them (assumed). Activations
are the inputs and outputs of its products, and what attention keeps.

Letters: u unique shape rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from costmodels.blocks.attention_core import AttentionCore
from costmodels.blocks.builder import UNFUSED_PASSES, OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.contract import AbstractBlock, Exchanges, HeldParameters
from costmodels.blocks.mask import Mask
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator, OpKind, Phase
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray, IntArray


class Product(NamedTuple):
    """Product of all tokens with a weight.

    Attributes:
        rows: Rows for each token.
        inputs: Elements of a row that it reads.
        outputs: Elements of a row that it writes.
    """

    rows: float
    inputs: int
    outputs: int


class Heads(NamedTuple):
    """Attention of a part."""

    number: int
    kv_number: int
    head_dim: int
    value_head_dim: int
    mask: Mask


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPart(AbstractBlock):
    """Part of a layer.

    Attributes:
        hidden_size: Width of a token.
        products: Products with weights that every token meets.
        heads: Attention, each.
        scan_flops: FLOPs of products of activations of one token, in the forward pass.
        square_flops: FLOPs of those that grow with the sequence, for each token before it.
        moved_bytes: Bytes that everything else reads and writes of one token in eager kernels of 16 bits.
        dense_parameters: Parameters without those of experts.
        lent_parameters: Parameters of a layer before it that its products use too (Zamba 2).
    """

    hidden_size: int
    products: tuple[Product, ...]
    heads: tuple[Heads, ...] = ()
    scan_flops: float = 0.0
    square_flops: float = 0.0
    moved_bytes: float = 0.0
    dense_parameters: int
    lent_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the part."""
        return self.dense_parameters

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]; tp is taken to divide all of them."""
        return HeldParameters(dense=self.dense_parameters / degrees.tp.astype(np.float64))

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:
        """Return the FLOPs of one token that belong to no weight of its own, a causal mask not halved."""
        total = self.scan_flops + 2.0 * self.lent_parameters + self.square_flops * length
        for one in self.heads:
            share = one.mask.share(length) * (2.0 if one.mask.causal else 1.0)
            total = total + 2.0 * length * share * one.number * (one.head_dim + one.value_head_dim)
        return total

    def _cut(self, product: Product, tp: FloatArray | IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the inputs and outputs of a product on one rank."""
        once = np.ones_like(tp, dtype=np.float64)
        if product.outputs == self.hidden_size and product.inputs != self.hidden_size:
            return product.inputs / tp, product.outputs * once
        return product.inputs * once, product.outputs / tp

    def _are_last(self) -> list[bool]:
        """Return which products write the part's result."""
        writes = [one.outputs == self.hidden_size for one in self.products]
        reads = [one.inputs == self.hidden_size for one in self.products]
        last = len(writes) - 1
        both = zip(writes, reads, strict=True)
        return [write and (not read or at == last) for at, (write, read) in enumerate(both)]

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the products before the core, the core, the products after it, and the passes over memory."""
        first, last = list[Operator](), list[Operator]()
        for at, (product, is_last) in enumerate(zip(self.products, self._are_last(), strict=True)):
            inputs, outputs = self._cut(product, build.context.degrees.tp)
            (last if is_last else first).extend(
                build.matmul(f"product_{at}", build.context.tokens * product.rows, inputs, outputs)
            )
        return [*self._passes(build), *first, *self.core(build), *last]

    def _passes(self, build: OperatorBuilder) -> list[Operator]:
        context = build.context
        fused = UNFUSED_PASSES if context.facts.fused_elementwise else 1.0
        moved = context.residual * (self.moved_bytes / fused * context.element_bytes / 2.0)
        return [
            build.operator(name, OpKind.ELEMENTWISE, phase, context.precision, (moved / 2.0,), passes * moved)
            for name, phase, passes in (("passes", Phase.FORWARD, 1.0), ("passes.gradient", Phase.BACKWARD, 2.0))
        ]

    def _cores(self, context: BlockContext) -> list[AttentionCore]:
        tp = context.degrees.tp
        return [
            AttentionCore(
                mask=one.mask,
                heads=one.number / tp,
                head_dim=one.head_dim,
                value_head_dim=one.value_head_dim,
                kv_size=np.maximum(one.kv_number / tp, 1.0) * one.value_head_dim,
            )
            for one in self.heads
        ]

    def core(self, build: OperatorBuilder) -> list[Operator]:
        """Return attention and the products of activations."""
        context = build.context
        found = [operator for core in self._cores(context) for operator in core.operators(build)]
        flop = self.scan_flops + self.square_flops * np.asarray(context.length, dtype=np.float64)
        if self.scan_flops or self.square_flops:
            inner = build.as_core().of_module("core_attn")
            rows = context.tokens / context.degrees.tp
            found += inner.chunked("core.activations", rows, 128, np.broadcast_to(flop / 256.0, rows.shape))
        return found

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the part's input, the outputs of its first products, the inputs of others, and attention's tensors."""
        context = tally.context
        elements = np.zeros_like(tally.tokens)
        for product, is_last in zip(self.products, self._are_last(), strict=True):
            inputs, outputs = self._cut(product, context.degrees.tp)
            kept = inputs if is_last or product.inputs != self.hidden_size else outputs
            elements = elements + tally.tokens * product.rows * kept
        core = np.zeros_like(tally.tokens)
        for own in self._cores(context):
            core = core + own.kept_bytes(context)
        kept = tally.hidden + tally.kept_input + tally.width * elements + core
        dropped = core * (tally.drops("core_attn") and not context.facts.selective_products)
        return BlockMemory(kept=kept, dropped=dropped, gradient=tally.hidden)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices of the products."""
        tp = degrees.tp.astype(np.float64)
        return [
            Matrix(rows=one.outputs, columns=one.inputs, cut="columns" if is_last else "rows", ways=tp)
            for one, is_last in zip(self.products, self._are_last(), strict=True)
        ]

    def sizes(self) -> dict[str, int]:
        """Return the heads of the first attention."""
        return {"heads": self.heads[0].number, "kv_heads": self.heads[0].kv_number} if self.heads else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMixer(TracedPart):
    """Part of a layer in which tokens meet."""

    kind: ClassVar[str] = "traced_mixer"
    family: ClassVar[Family] = Family.MIXER

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return keys and values of the ring, and what Ulysses sends; with a scan, what an exchange of heads sends."""
        tp = context.degrees.tp
        keys, queries = np.zeros_like(context.tokens), np.zeros_like(context.tokens)
        for one in self.heads:
            keys = keys + np.maximum(one.kv_number / tp, 1.0) * (one.head_dim + one.value_head_dim)
            queries = queries + one.number * (one.head_dim + one.value_head_dim) / tp
        if self.heads:
            tokens = context.tokens
            return Exchanges(tensor=True, ring=tokens * keys, heads=tokens * (queries + keys))
        width = sum(max(one.inputs, one.outputs) * one.rows for one in self.products)
        dealt = context.tokens * width / tp
        return Exchanges(tensor=True, heads=dealt, dealt=dealt)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMlp(TracedPart):
    """Part of a layer in which each token is alone."""

    kind: ClassVar[str] = "traced_mlp"
    family: ClassVar[Family] = Family.MLP

    def exchanges(self, context: BlockContext) -> Exchanges:  # noqa: ARG002 # the contract's
        """Return that tp gathers the input and scatters the output."""
        return Exchanges(tensor=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedExperts(TracedPart):
    """Part of a layer whose tokens visit some of many experts.

    Attributes:
        routed: Products of the experts; `rows` are those of all experts for each token.
        num_experts: Number of experts.
        expert_parameters: Parameters of all experts.
    """

    kind: ClassVar[str] = "traced_experts"
    family: ClassVar[Family] = Family.EXPERTS

    routed: tuple[Product, ...]
    num_experts: int
    expert_parameters: int

    @property
    def visits(self) -> float:
        """Experts that one token visits."""
        return max(one.rows for one in self.routed)

    @property
    def parameters(self) -> int:
        """Parameters with those of all experts."""
        return self.dense_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.dense_parameters + round(self.expert_parameters * self.visits / self.num_experts)

    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters of one rank [n]: ep and expert_tp divide experts."""
        expert = self.expert_parameters / (degrees.expert_tensor * degrees.ep)
        return HeldParameters(
            dense=self.dense_parameters / degrees.tp.astype(np.float64),
            expert=expert,
            one_expert=expert / np.maximum(self.num_experts / degrees.ep, 1.0),
        )

    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return the products of every token, and the grouped products of the experts."""
        build = build.of_module("moe")
        context, degrees = build.context, build.context.degrees
        found = [*self._passes(build)]
        for at, product in enumerate(self.products):
            inputs, outputs = self._cut(product, degrees.tp)
            found += build.matmul(f"product_{at}", context.tokens * product.rows, inputs, outputs)
        rows = context.residual * context.expert_ranks
        for at, product in enumerate(self.routed):
            inputs, outputs = self._cut(product, degrees.expert_tensor)
            groups = self.num_experts / degrees.ep
            found += build.matmul(f"routed_{at}", rows * product.rows, inputs, outputs, groups=groups)
        return found

    def memory(self, tally: Tally) -> BlockMemory:
        """Tally the part's tensors, and inputs and inner values of the routed rows."""
        own, context = TracedPart.memory(self, tally), tally.context
        rows, routed = context.residual * context.expert_ranks, np.zeros_like(tally.tokens)
        for product in self.routed:
            inputs, _ = self._cut(product, context.degrees.expert_tensor)
            routed = routed + tally.width * rows * product.rows * inputs
        dropped = own.dropped + routed * tally.drops("moe")
        return BlockMemory(kept=own.kept + routed, dropped=dropped, gradient=own.gradient + routed)

    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return the routed rows."""
        rows = context.residual * self.visits * context.expert_ranks
        return Exchanges(tensor=bool(self.products), routed=rows, visits=self.visits, routed_width=self.hidden_size)

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:
        """Return the matrices of the products, and those of every expert."""
        ways = degrees.expert_tensor.astype(np.float64)
        own = TracedPart.matrices(self, degrees, joins_gate=joins_gate, splits_qkv=splits_qkv)
        each = self.num_experts / degrees.ep
        return own + [
            Matrix(part="expert", rows=one.outputs, columns=one.inputs, cut="rows", ways=ways, each=each)
            for one in self.routed
        ]

    def sizes(self) -> dict[str, int]:
        """Return the number of experts."""
        return {"experts": self.num_experts, "top_k": round(self.visits)}
