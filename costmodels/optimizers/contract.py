"""What an optimizer answers: the states of each part of a model, the traffic of its update, and its matrix products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from hardware.arrays import FloatArray

Part = Literal["matrix", "expert", "vector", "embedding", "head"]
"""Part of a model: matrices of layers, those of routed experts, everything of one dimension, and the two tables."""
PARTS: tuple[Part, ...] = get_args(Part)
MATRICES: tuple[Part, ...] = ("matrix", "expert")
"""Parts that are matrices of layers."""

MOMENT_BYTES = 4
"""Size of an element of a moment [bytes]: float32, whatever the precision of the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State that an optimizer keeps of a part.

    Attributes:
        name: Name of the state.
        width: Bytes of an element, or whether it is as wide as the run's `first` or `second` moments.
        is_factored: Whether it has an element for each row and each column of a matrix instead of one for each of its
            elements.
    """

    name: str
    width: Literal["first", "second"] | float
    is_factored: bool = False


class Widths(NamedTuple):
    """Widths that a run gives to what its optimizer keeps [bytes].

    Attributes:
        weight: The optimizer's own copy of a weight.
        first: An element of the first moment.
        second: An element of the second moment.
    """

    weight: float
    first: float
    second: float

    def of(self, state: State) -> float:
        """Return the width of a state [bytes]."""
        return state.width if isinstance(state.width, (int, float)) else float(getattr(self, state.width))


class Product(NamedTuple):
    """Matrix product [m, k] @ [k, n] of an update.

    Attributes:
        m: Rows of the first factor [u].
        k: Length of the sums [u].
        n: Columns of the second factor [u].
        times: How often one update of one matrix multiplies so [u], or one number.
    """

    m: FloatArray
    k: FloatArray
    n: FloatArray
    times: FloatArray | int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbstractOptimizer(ABC):
    """Optimizer by its states, its update and its names.

    Attributes:
        spellings: Names in each framework, in lower case. Exporters write the first, importers read all.
        sharded_by: ZeRO stages from 1 under which a framework can shard its states; all without an entry.
        offloaded_by: Frameworks that keep its states on the host.
    """

    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sharded_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    offloaded_by: tuple[str, ...] = ("deepspeed", "gpt-neox")

    @abstractmethod
    def states(self, part: Part) -> tuple[State, ...]:
        """Return the states that it keeps of a part, beside its own copy of the weights."""

    @abstractmethod
    def further_bytes(self, part: Part) -> float:
        """Return the bytes per parameter that an update moves beside gradient, weight and states, each once."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the states of a layer's matrices that are as large as these."""
        return tuple(state.name for state in self.states("matrix") if not state.is_factored)

    @property
    def is_uniform(self) -> bool:
        """Whether it treats all parts alike, element by element."""
        first = self.states(PARTS[0]), self.further_bytes(PARTS[0])
        alike = all((self.states(part), self.further_bytes(part)) == first for part in PARTS)
        return alike and not self.needs_matrices and not any(state.is_factored for state in first[0])

    @property
    def needs_matrices(self) -> bool:
        """Whether its update multiplies whole matrices, so that no rank can update a part of one."""
        return False

    def products(self, rows: FloatArray, columns: FloatArray, *, steps: int, method: str) -> tuple[Product, ...]:  # noqa: ARG002 # for those that multiply
        """Return the products of the update of one matrix of a layer [u]; none if it works element by element.

        Args:
            rows: Rows of the matrix [u].
            columns: Its columns [u].
            steps: Newton-Schulz iterations.
            method: How they are computed, `standard` or `gram`.
        """
        return ()

    def sharded_stage(self, framework: str, stage: int) -> int:
        """Return the largest ZeRO stage up to `stage` in which a framework can shard its states; 0 for none."""
        return max((own for own in self.sharded_by.get(framework, (1, 2, 3)) if own <= stage), default=0)

    def state_bytes(self, part: Part, widths: Widths) -> float:
        """Return the bytes per parameter of the states that have as many elements as the part."""
        return float(sum(widths.of(state) for state in self.states(part) if not state.is_factored))

    def line_bytes(self, part: Part, widths: Widths) -> float:
        """Return the bytes of the factored states per row and per column of a matrix."""
        return float(sum(widths.of(state) for state in self.states(part) if state.is_factored))
