"""An operator of a plan as one rank runs it: its rule, and the indices that the rank's parts have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from costmodels.sharding.dims import Rule
from costmodels.sharding.layouts import Layout
from trials.torch_training.planned.digits import Digits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalOp:
    """An operator on this rank.

    Attributes:
        digits: Digits of the plan.
        number: Number of the operator in the graph.
        place: Coordinates of the rank in the mesh.
        top_k: Number of experts that a token goes to.
    """

    digits: Digits
    number: int
    place: Sequence[int]
    top_k: int
    _known: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    @property
    def rule(self) -> Rule:
        """Rule of the operator, with the sizes of whole tensors."""
        return self.digits.plan.graph.ops[self.number].rule

    def indices(self, operand: int, dim: int) -> Tensor:
        """Return the indices of an operand's dim that the rank has: int64, in increasing order."""
        tensor = self.digits.plan.graph.ops[self.number].operands[operand]
        return self._indices("operand", operand, tensor, dim, self.digits.plan.wanted(self.number, operand))

    def result_indices(self, result: int, dim: int) -> Tensor:
        """Return the indices of a result's dim that the rank has: int64, in increasing order."""
        tensor = self.digits.plan.graph.ops[self.number].results[result]
        return self._indices("result", result, tensor, dim, self.digits.plan.written(self.number, result))

    def places(self, operand: int, dim: int) -> Tensor:
        """Return the place of each index of an operand's whole dim in the rank's part; -1 where the part lacks it."""
        return _places(self.indices(operand, dim), self.rule.operand_shape(operand)[dim])

    def result_places(self, result: int, dim: int) -> Tensor:
        """Return the place of each index of a result's whole dim in the rank's part; -1 where the part lacks it."""
        return _places(self.result_indices(result, dim), self.rule.result_shape(result)[dim])

    def _indices(self, side: str, slot: int, tensor: int, dim: int, layout: Layout) -> Tensor:
        key = (side, slot, dim)
        if key not in self._known:
            self._known[key] = torch.from_numpy(self.digits.indices(tensor, dim, layout, self.place))
        return self._known[key]


def _places(indices: Tensor, size: int) -> Tensor:
    found = indices.new_full((size,), -1)
    found[indices] = torch.arange(len(indices))
    return found


Compute = Callable[..., tuple[Tensor, ...]]
"""Function of a LocalOp and its operands that returns its results."""
