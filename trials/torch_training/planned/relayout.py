"""Changes of layouts between the ranks of a plan, by the digits of its axes."""

from __future__ import annotations

from torch import Tensor

from costmodels.sharding.exports.layout_changes import Axes, change_steps
from costmodels.sharding.exports.relayouts import relayouts
from costmodels.sharding.exports.torch_changes import Change, change_of, cut_part, move_part
from costmodels.sharding.layouts import Layout
from trials.torch_training.planned.digits import Digits
from trials.torch_training.planned.mesh import PlanMesh


def group_axes(digits: Digits) -> set[Axes]:
    """Return the axes of all groups that the layout changes of a plan need."""
    plan = digits.plan
    return {
        step.axes
        for each in relayouts(plan)
        for step in change_steps(
            digits.placement(each.tensor, each.before),
            digits.placement(each.tensor, each.after),
            plan.graph.tensors[each.tensor].shape,
            plan.mesh.sizes,
        )
        if step.kind is not None
    }


class Relayout:
    """Layout changes of this rank's parts.

    Args:
        digits: Digits of the plan.
        mesh: Mesh of the plan.
    """

    def __init__(self, digits: Digits, mesh: PlanMesh) -> None:
        self._digits, self._mesh = digits, mesh

    def cut(self, whole: Tensor, tensor: int, layout: Layout) -> Tensor:
        """Return this rank's part of a whole tensor."""
        return cut_part(whole, self._digits.placement(tensor, layout), self._mesh)

    def change(self, tensor: int, before: Layout, after: Layout, *, is_maximum: bool = False) -> Change | None:
        """Return the change of a tensor's layout; None if there is nothing to do.

        Args:
            tensor: Number of the tensor.
            before: Current layout.
            after: Wanted layout.
            is_maximum: Whether parts of a sum are parts of a maximum instead.
        """
        old, new = (self._digits.placement(tensor, layout) for layout in (before, after))
        shape = self._digits.plan.graph.tensors[tensor].shape
        return change_of(old, new, shape, self._mesh, reduction="max" if is_maximum else "sum")

    def move(self, value: Tensor, change: Change) -> Tensor:
        """Return this rank's part of a tensor in another layout."""
        return move_part(value, change, self._mesh)
