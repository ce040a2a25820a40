"""Trace of a model: numbers and shapes, no objects of torch.

A model is rows of layers and the ends around them. Equal layers are one block, described once. A block lists its
parameters and what one forward pass of a micro-batch runs in it, as amounts of its b sequences of s tokens
(`amounts.py`). Nothing here knows a model by its name.

Backward: of each product with a weight, two of the same FLOPs (gradients of the input and of the weight); of one of two
activations, two as well; of attention, 2.5 times its forward where scores are formed again (FlashAttention-2,
arXiv 2307.08691, section 3.1), twice where they are kept. Passes over memory are read and written again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from costmodels.traced.amounts import NOTHING, Amount

Part = Literal["token mixer", "channel mixer", "norm", "other"]
ProductKind = Literal["matrix", "experts", "convolution", "activations"]
PassKind = Literal["norm", "pointwise", "gather", "copy"]
EndKind = Literal["embedding", "head", "norm", "mtp", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParameter:
    """One parameter of a block: its path inside the block, its shape, and the part of the block that holds it."""

    name: str
    shape: tuple[int, ...]
    part: Part = "other"
    is_expert: bool = False
    """Whether the first dim counts routed experts, or the parameter belongs to one of them."""
    is_shared: bool = False
    """Whether further blocks hold the same tensor; `TracedModel.shared` has it once."""

    @property
    def size(self) -> int:
        """Number of values."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedProduct:
    """Products of one place in a block: `batch` products [m, k] times [k, n], run `count` times in a forward pass.

    Experts: m are the rows of all experts together, batch is 1. Convolution: m the outputs' places, k what one output
    sums over, n the channels. Activations: products without a weight, such as those of a state space or of linear
    attention, as the fallback in torch forms them, of an indexer's scores, or of attention that a class writes out.
    """

    module: str
    part: Part
    kind: ProductKind
    weight: str
    """Path of the weight inside the block; empty where both factors are activations."""
    fallback: str = ""
    """Function in torch that stands in for a fused kernel, which moves less and may form other products."""
    groups: int = 1
    """Experts among which the rows of an `experts` product are divided."""
    count: Amount
    shape: tuple[Amount, Amount, Amount, Amount] | None
    """(batch, m, k, n) of one run, or None where runs of this place are unlike, as in a loop over a triangle."""
    flops: Amount
    """FLOPs of all runs in one forward pass: 2 for each multiplication with its addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Which keys a query sees; 0 is no limit.

    Those before it (`causal`), the last `window`, those of its own `chunk`, or the `selected` ones of an indexer.
    """

    causal: bool
    window: int = 0
    chunk: int = 0
    selected: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedAttention:
    """Attention of one place in a block."""

    module: str
    part: Part
    count: Amount
    batch: Amount
    queries: Amount
    keys: Amount
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    reach: Reach
    has_sinks: bool

    rectangle_flops: Amount
    """FLOPs of all runs in one forward pass over every pair of a query and a key, masked or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPass:
    """Reads and writes of one place in a block that are no products, unfused as eager torch runs them in bf16."""

    module: str
    part: Part
    kind: PassKind
    count: Amount
    read_bytes: Amount
    written_bytes: Amount


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBlock:
    """Layer of a row, or one end, with its parameters and operators."""

    name: str
    class_name: str
    parameters: tuple[TracedParameter, ...]
    products: tuple[TracedProduct, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    passes: tuple[TracedPass, ...] = ()
    bounds: tuple[str, ...] = ()
    """What was not run or not fitted, each in a sentence that names it."""

    @property
    def num_parameters(self) -> int:
        """Parameters, with those that other blocks hold too."""
        return sum(parameter.size for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRow:
    """A row of layers, such as a decoder or a vision tower: for each layer in order the index of its block."""

    name: str
    kinds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedEnd:
    """A part of the model outside its rows."""

    kind: EndKind
    block: TracedBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModel:
    """A model as transformers builds it."""

    model_type: str
    class_name: str
    version: str
    """Version of transformers."""
    rows: tuple[TracedRow, ...]
    """The row with most parameters comes first."""
    kinds: tuple[TracedBlock, ...]
    ends: tuple[TracedEnd, ...]
    shared: tuple[TracedParameter, ...]
    """Parameters that several blocks hold, once each."""
    num_buffer_values: int
    """Values of a checkpoint that are no parameters, such as the correction biases of DeepSeek-V3's routers."""
    tied_embeddings: bool
    notes: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each tensor once, without MTP modules."""
        own = sum(
            parameter.size for block in self.blocks() for parameter in block.parameters if not parameter.is_shared
        )
        return own + sum(parameter.size for parameter in self.shared)

    @property
    def forward_flops(self) -> Amount:
        """FLOPs of a forward pass without MTP modules; attention counts every pair, as counters of frameworks do."""
        parts = [part.flops for block in self.blocks() for part in block.products]
        parts += [part.rectangle_flops for block in self.blocks() for part in block.attentions]
        return sum(parts, start=NOTHING)

    def blocks(self) -> Iterator[TracedBlock]:
        """Yield the block of every layer, in order and as often as it stands there, and those of ends without MTP."""
        for row in self.rows:
            yield from (self.kinds[kind] for kind in row.kinds)
        yield from (end.block for end in self.ends if end.kind != "mtp")
