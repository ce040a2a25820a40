"""Contract of a block: what a kind says about itself, and no file but its own.

Sizes of a block are those of whole, unsharded tensors. Methods that take shapes are vectorised: they return arrays with
one entry for each row. Letters: n configurations, u unique shape rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, Degrees
from costmodels.blocks.graph import BlockGraph
from costmodels.blocks.matrix import Matrix
from costmodels.blocks.operator import Family, Operator
from costmodels.blocks.tally import BlockMemory, Tally
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldParameters:
    """Parameters of a block that one rank keeps before ZeRO shards them, each array [n].

    Attributes:
        dense: Weights that all ranks of a stage's `weights` group share.
        expert: Weights that the `expert_weights` group shares.
        one_expert: Those of one expert.
        frozen: Further weights that no step changes, which have no gradients and no states.
    """

    dense: FloatArray
    expert: FloatArray | float = 0.0
    one_expert: FloatArray | float = 0.0
    frozen: FloatArray | float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchanges:
    """Elements that the ranks of a block exchange in one forward pass of one micro-batch, each array [n].

    Attributes:
        tensor: Whether the block gathers its input over tp and scatters its output, once a pass.
        ring: Elements of the message that goes once round the ring of cp: keys and values of a rank's tokens.
        heads: Elements that Ulysses sends over up: queries, keys, values and the output of a rank's tokens.
        dealt: Elements that a mixer sends all to all over cp to have whole sequences of some heads.
        routed: Rows that a rank's experts multiply; None without experts.
        visits: Mean number of experts that compute for one token.
        routed_width: Width of a routed token.
    """

    tensor: bool = False
    ring: FloatArray | None = None
    heads: FloatArray | None = None
    dealt: FloatArray | None = None
    routed: FloatArray | None = None
    visits: float = 0.0
    routed_width: int = 0


class AbstractBlock(ABC):
    """One part of a model that a stage holds whole: a mixer, an MLP, or an end, with its norm and its residual."""

    __slots__ = ()

    kind: ClassVar[str]
    """Name of the kind, as a model file writes it."""
    family: ClassVar[Family]
    """Family of blocks that the kind belongs to."""

    @property
    def label(self) -> str:
        """Word for the block in the names of its operators."""
        return self.kind

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Parameters of the whole block."""

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.parameters

    def mixing_flops(self, length: FloatArray | float) -> FloatArray | float:  # noqa: ARG002 # a block without a mixer needs none
        """Return the model FLOPs of one token's forward pass beyond two per parameter, in sequences of that length."""
        return 0.0

    @abstractmethod
    def held(self, degrees: Degrees) -> HeldParameters:
        """Return the parameters that one rank keeps [n]."""

    @abstractmethod
    def operators(self, build: OperatorBuilder) -> list[Operator]:
        """Return all operators of both passes, those of the forward pass in the order in which they run."""

    def core(self, build: OperatorBuilder) -> list[Operator]:  # noqa: ARG002
        """Return the operators between the projections of a mixer, which depend on mbs, cp and up themselves."""
        return []

    @abstractmethod
    def memory(self, tally: Tally) -> BlockMemory:
        """Return the tensors that the block keeps for its backward pass [u]."""

    @abstractmethod
    def exchanges(self, context: BlockContext) -> Exchanges:
        """Return what the ranks of the block exchange [u]."""

    def matrices(self, degrees: Degrees, *, joins_gate: bool, splits_qkv: bool) -> list[Matrix]:  # noqa: ARG002
        """Return the matrices of the block as one rank keeps them; ends have none here, their tables count apart.

        Args:
            degrees: Degrees of parallelism [w].
            joins_gate: Whether the framework joins the gate and the first matrix of an MLP.
            splits_qkv: Whether queries, keys and values are matrices of their own.
        """
        return []

    def add_to(self, graph: BlockGraph, x: int) -> int:  # noqa: ARG002 # the block is refused
        """Add the block's operators on the tensor x to the graph of a training step, and return its output.

        Raises:
            ConfigError: No graph of the block is known, so that its shardings cannot be planned.
        """
        raise ConfigError(
            f"has blocks of the kind {self.kind}, of which no graph is known that planners could shard",
            key="model",
            nearest="planner: {name: megatron}, the plan by hand",
        )

    def sizes(self) -> dict[str, int]:
        """Return the sizes that degrees of parallelism cut, by role.

        Roles: `heads` (dealt over tp and up), `kv_heads` and `state_heads` (over tp), `scanned_heads` and
        `scanned_groups` (dealt or copied over the ranks of a sequence, where a state runs), `projection` (width of one
        product for queries, keys and values), `ffn` (inner size, over tp), `experts` (over ep), `expert_ffn` (over
        expert_tp); and `top_k`, the experts that a token visits, which nothing cuts.
        """
        return {}

    def cached(self, tp: int) -> float:  # noqa: ARG002 # a block without a mixer keeps nothing
        """Return the elements that decoding keeps of one token on each rank of tp."""
        return 0.0
