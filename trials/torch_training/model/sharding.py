"""Layouts of the trainer's tensors over tensor-parallel ranks, in one table that all other code follows.

Weights have logical dims (see weights.py). Activations are [sequences, positions, features]. Placements are torch's:
Shard(dim), Replicate, or Partial for terms of a sum. The table follows Megatron-LM (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.2 with sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Layout of all tensors over one axis of the mesh.

    Attributes:
        weights: Placement of each weight by its role; expert weights have that of tensor parallelism inside one expert.
        activations: Placement of each activation by its role.
    """

    weights: Mapping[str, Placement]
    activations: Mapping[str, Placement]

    def has_partial_gradient(self, weight: str, meets: str) -> bool:
        """Return whether ranks hold terms of a weight's gradient: a whole weight applied to a part of an activation."""
        return self.weights[weight].is_replicate() and not self.activations[meets].is_replicate()


def megatron_sharding(*, sequence_parallel: bool) -> Sharding:
    """Return Megatron-LM's layout: columns, then rows; residuals and norms are whole or split over the positions."""
    # Sequence parallelism splits the dim of positions. A first product split by columns and a second one by rows need
    # no communication between them.
    residual = Shard(1) if sequence_parallel else Replicate()
    return Sharding(
        weights={
            "embedding.tokens": Shard(0),
            "embedding.positions": Replicate(),
            "norm": Replicate(),
            "attention.qkv": Shard(0),
            "attention.head_norm": Replicate(),
            "attention.proj": Shard(1),
            "attention.proj_bias": Replicate(),
            "mlp.up": Shard(1),
            "mlp.down": Shard(1),
            "mlp.down_bias": Replicate(),
            "moe.router": Replicate(),
            "head": Shard(0),
        },
        activations={
            "residual": residual,
            "heads": Shard(2),
            "embedding.output": Partial(),
            "attention.input": Replicate(),
            "attention.output": Partial(),
            "mlp.input": Replicate(),
            "mlp.output": Partial(),
            "head.input": Replicate(),
        },
    )


class Layout:
    """Conversion of activations between placements.

    Args:
        sharding: Table of placements.
        mesh: Mesh of the tensor-parallel ranks; None for a single rank.
        index: Index of this rank in the mesh.
    """

    def __init__(self, sharding: Sharding, mesh: DeviceMesh | None, index: int) -> None:
        self.sharding = sharding
        self.mesh = mesh
        self.index = index

    @property
    def size(self) -> int:
        """Number of tensor-parallel ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    def move(self, tensor: Tensor, source: str, target: str) -> Tensor:
        """Return this rank's part of an activation in the role `target`, from its part in the role `source`.

        If the target is a whole activation, each rank uses it differently, so its gradients are terms of a sum.
        """
        if self.mesh is None:
            return tensor
        have, want = self.sharding.activations[source], self.sharding.activations[target]
        moved = DTensor.from_local(tensor, self.mesh, [have], run_check=False).redistribute(placements=[want])
        # A whole activation is used differently on each rank, so each rank has a term of its gradient.
        gradient = Partial() if want.is_replicate() and not have.is_partial() else want
        return moved.to_local(grad_placements=[gradient])
