"""Graph of a training step, as a block adds its operators to it for the planners of shardings.

A tensor is a number, and a pattern writes the names of the factors of its dims: spaces separate dims, parentheses hold
a dim of several factors, the slowest first. An axis of devices may cut a factor that comes first on all its dims and
that no operator blocks. `batch` and `sequence` are every graph's; other sizes are the block's own (`sized`). A role
names an operator inside the block.

Plans by hand know factors by their names, whatever kind of block has them (tuner/planners/sharding/hand_made.py): heads
of attention are `kv_heads` with their `query_groups`, heads of a state `state_heads`, inner sizes `ffn` and
`shared_ffn`. Roles that begin with `core` are those between the projections of a mixer, where ranks that share a
sequence deal heads; `*norm`, `*residual` and `*_down` are those that sequence parallelism cuts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from costmodels.blocks.mask import Mask
from costmodels.blocks.operator import Family

ROWS = "batch sequence"
"""Pattern of the dims of all tokens."""
HIDDEN = f"{ROWS} hidden"
"""Pattern of what passes from block to block."""
HEADS = "(kv_heads query_groups)"
"""Pattern of the query heads: those of one key head are adjacent, so that an axis can cut `kv_heads` alone."""


class BlockGraph(Protocol):
    """Graph under construction, with the gradients of all operators that are added."""

    @property
    def batch(self) -> int:
        """Sequences of the micro-batch."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""

    def sized(self, **sizes: int) -> BlockGraph:
        """Return the same graph, with the sizes of further factors."""

    def under(self, role: str) -> BlockGraph:
        """Return the same graph, for operators whose roles begin with that one."""

    def parameter(self, role: str, pattern: str) -> int:
        """Add a trained parameter."""

    def linear(
        self,
        role: str,
        x: tuple[int, str],
        weights: Mapping[str, tuple[str, str]],
        *,
        is_wide: bool = False,
        primitive: str = "matmul",
        is_detached: bool = False,
    ) -> tuple[int, ...]:
        """Add the products of one tensor with new weights as one operator; return one result for each.

        Args:
            role: Role of the operator.
            x: Tensor and its pattern.
            weights: Pattern of each weight and of its product, by a label, which may be empty.
            is_wide: Whether the products do not support a narrow precision.
            primitive: `matmul`, or `batch_matmul` if the weights share a dim with both other tensors.
            is_detached: Whether no gradient of the input is computed.
        """

    def bias(self, role: str, x: int, pattern: str) -> int:
        """Add the addition of a new parameter that has some of the tensor's dims."""

    def norm(self, role: str, x: int, *, over: str, has_bias: bool = False) -> int:
        """Add a norm over the dims of that pattern, which stay whole."""

    def rotary(self, role: str, x: int) -> int:
        """Add rotary positions to heads of `head_dim`."""

    def latent_key(self, role: str, plain: int, turned: int) -> int:
        """Add the keys of latent attention: a plain part of each head, and a rotary part that all share."""

    def attention(
        self, role: str, inputs: tuple[int, int, int], mask: Mask, *, sink: int | None = None, chosen: int | None = None
    ) -> int:
        """Add attention of queries, keys and values under a mask.

        Args:
            role: Role of the operator.
            inputs: Queries, keys and values.
            mask: Mask, which says what share of the scores is computed.
            sink: Learned logit of each head, to which no value belongs.
            chosen: Keys that each query sees, by their numbers.
        """

    def activation(self, role: str, x: int, pattern: str, *, is_gated: bool) -> int:
        """Add an activation with that pattern; a gated one reads a tensor with a dim `gates` before its last."""

    def scale(self, role: str, x: int, gate: int) -> int:
        """Add the product of a tensor with the sigmoid of another one, which may lack the last dim."""

    def add(self, role: str, parts: Sequence[int]) -> int:
        """Add the sum of tensors."""

    def routing(self, role: str, logits: int, *, experts: str) -> int:
        """Add the weights of the experts that a router chooses; `experts` is the factor of all that it scores."""

    def dispatch(self, role: str, x: int, weights: int, *, width: str) -> int:
        """Add the copy of tokens of that width into the slots of their experts."""

    def combine(self, role: str, slots: int, weights: int, *, width: str) -> int:
        """Add the sum of each token's slots, weighted by the routing."""

    def kernel(
        self,
        role: str,
        primitive: str,
        operands: Mapping[str, tuple[int, str]],
        results: Mapping[str, str],
        *,
        whole: Sequence[str],
        flop: float = 0.0,
        reads_results: bool = False,
        element_bytes: float | None = None,
    ) -> tuple[int, ...]:
        """Add an operator of the block's own kind; its gradient takes twice the FLOPs.

        Args:
            role: Role of the operator.
            primitive: Name of the computation.
            operands: Tensors that it reads, with their patterns, by labels of their gradients.
            results: Patterns of what it writes, by labels; the gradient of the first one arrives from its readers.
            whole: Factors that no axis may cut.
            flop: FLOPs of one forward pass.
            reads_results: Whether the gradient reads the results, too.
            element_bytes: Size of an element of the results [bytes]; None for that of activations.
        """

    def next_embedding(self, role: str) -> int:
        """Add the lookup of the tokens that follow those of the batch."""


class Normed(Protocol):
    """Block with norms over the hidden size."""

    @property
    def family(self) -> Family:
        """Family of the block."""

    @property
    def hidden_size(self) -> int:
        """Width of a token."""

    @property
    def norms(self) -> float:
        """Norms over the hidden size that belong to the block."""

    @property
    def norm_size(self) -> int:
        """Parameters of one such norm."""


def enter(block: Normed, graph: BlockGraph, x: int) -> int:
    """Add the norm before a block, if it has one, and return the block's input."""
    return _add_norm(block, graph, "norm", x) if _count(block) else x


def leave(block: Normed, graph: BlockGraph, x: int, y: int) -> int:
    """Add the norms behind a block, and the residual connection from its input x to its output y."""
    for number in range(1, _count(block)):
        y = _add_norm(block, graph, "post_norm" if number == 1 else f"post_{number}_norm", y)
    return graph.add("residual", (x, y))


def _count(block: Normed) -> int:
    """Return the number of norms; of an odd number in a layer, the mixer has one more than the MLP."""
    return math.ceil(block.norms) if block.family is Family.MIXER else math.floor(block.norms)


def _add_norm(block: Normed, graph: BlockGraph, role: str, x: int) -> int:
    # RMSNorm has a weight of the hidden size, LayerNorm a bias, too
    return graph.norm(role, x, over="hidden", has_bias=block.norm_size > block.hidden_size)
