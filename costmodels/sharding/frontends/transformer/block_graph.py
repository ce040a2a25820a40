"""Graph of a training step, as blocks of a model add their operators to it (`costmodels/blocks/graph.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels.blocks.mask import Mask
from costmodels.sharding.frontends.transformer import layers
from costmodels.sharding.frontends.transformer.experts import combine, dispatch, routing, sigmoid_scale
from costmodels.sharding.frontends.transformer.training_step import Result, TrainingStep


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """Training step to which one block adds its operators.

    Attributes:
        step: Training step under construction.
        name: Name of the block, with which the names of its operators begin.
        precision: Type of the products.
        wide: Type of operators that do not support a narrow precision.
        embed: Function that adds the embedding of the tokens that follow, under a name.
    """

    step: TrainingStep
    name: str
    precision: str
    wide: str
    embed: Callable[[str], int]

    @property
    def batch(self) -> int:
        """Sequences of the micro-batch."""
        return self.step.sizes["batch"]

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return self.step.sizes["sequence"]

    def sized(self, **sizes: int) -> StepGraph:
        """Return the same graph, with the sizes of further factors."""
        return replace(self, step=self.step.sized(sizes))

    def under(self, role: str) -> StepGraph:
        """Return the same graph, for operators whose roles begin with that one."""
        return replace(self, name=f"{self.name}.{role}")

    def parameter(self, role: str, pattern: str) -> int:
        """Add a trained parameter."""
        return self.step.parameter(f"{self.name}.{role}", pattern)

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
        """Add the products of one tensor with new weights."""
        name = f"{self.name}.{role}"
        new = [
            (self.step.parameter(f"{name}.{label}_weight" if label else f"{name}.weight", dims), dims)
            for label, (dims, _) in weights.items()
        ]
        outputs = [(label, output) for label, (_, output) in weights.items()]
        precision = self.wide if is_wide else self.precision
        return layers.linear(
            self.step, name, x, new, outputs, precision=precision, primitive=primitive, is_detached=is_detached
        )

    def bias(self, role: str, x: int, pattern: str) -> int:
        """Add the addition of a new parameter."""
        return layers.bias(self.step, f"{self.name}.{role}", x, pattern)

    def norm(self, role: str, x: int, *, over: str, has_bias: bool = False) -> int:
        """Add a norm over the dims of a pattern."""
        return layers.norm(self.step, f"{self.name}.{role}", x, over=over, has_bias=has_bias)

    def rotary(self, role: str, x: int) -> int:
        """Add rotary positions."""
        return layers.rotary(self.step, f"{self.name}.{role}", x)

    def latent_key(self, role: str, plain: int, turned: int) -> int:
        """Add the keys of latent attention."""
        return layers.latent_key(self.step, f"{self.name}.{role}", plain, turned)

    def attention(
        self, role: str, inputs: tuple[int, int, int], mask: Mask, *, sink: int | None = None, chosen: int | None = None
    ) -> int:
        """Add attention of queries, keys and values; masks let through the share that the cost model counts."""
        operands = dict(zip(("queries", "keys", "values"), inputs, strict=True))
        operands |= {label: each for label, each in (("sink", sink), ("chosen", chosen)) if each is not None}
        step = self.step
        if chosen is not None:
            step = step.sized({"chosen": step.tensor(chosen).shape[-1]})
        words = ("sparse" if chosen is not None else mask.label, "attention")
        return layers.attention_core(
            step,
            f"{self.name}.{role}",
            operands,
            primitive="_".join(word for word in words if word) + ("_with_sink" if sink is not None else ""),
            share=float(mask.share(self.sequence_length)),
            precision=self.wide,
        )

    def activation(self, role: str, x: int, pattern: str, *, is_gated: bool) -> int:
        """Add an activation."""
        return layers.activation(self.step, f"{self.name}.{role}", x, pattern, is_gated=is_gated)

    def scale(self, role: str, x: int, gate: int) -> int:
        """Add the product of a tensor with the sigmoid of another one."""
        return sigmoid_scale(self.step, f"{self.name}.{role}", x, gate)

    def add(self, role: str, parts: Sequence[int]) -> int:
        """Add the sum of tensors."""
        return layers.add(self.step, f"{self.name}.{role}", parts)

    def routing(self, role: str, logits: int, *, experts: str) -> int:
        """Add the weights of the experts that a router chooses."""
        return routing(self.step, f"{self.name}.{role}", logits, scored=experts)

    def dispatch(self, role: str, x: int, weights: int, *, width: str) -> int:
        """Add the copy of tokens into the slots of their experts."""
        return dispatch(self.step, f"{self.name}.{role}", x, weights, width=width)

    def combine(self, role: str, slots: int, weights: int, *, width: str) -> int:
        """Add the sum of each token's slots."""
        return combine(self.step, f"{self.name}.{role}", slots, weights, width=width)

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
        """Add an operator of the block's own kind."""
        return layers.kernel(
            self.step,
            f"{self.name}.{role}",
            primitive,
            operands,
            {Result(label=label, element_bytes=element_bytes): pattern for label, pattern in results.items()},
            blocked=whole,
            flop=flop,
            gradient_flop=2.0 * flop,
            precision=self.wide if flop else "",
            reads_results=reads_results,
        )

    def next_embedding(self, role: str) -> int:
        """Add the lookup of the tokens that follow those of the batch."""
        return self.embed(f"{self.name}.{role}")
