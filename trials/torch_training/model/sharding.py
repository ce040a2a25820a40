"""How the tensors of the trainer are laid out over tensor-parallel ranks: one table, which everything else follows.

Weights have logical dims (see weights.py), activations are [sequences, positions, features]. A placement is torch's:
Shard(dim), Replicate, or Partial for terms of a sum. The table here is Megatron's (Shoeybi et al. 2019, section 3;
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
    """The layout of all tensors over one axis of the mesh.

    Attributes:
        weights: Placement of each weight by its role. Experts' weights name those inside one expert.
        activations: Placement of each activation by its role.
    """

    weights: Mapping[str, Placement]
    activations: Mapping[str, Placement]

    def has_partial_gradient(self, weight: str, meets: str) -> bool:
        """Whether ranks hold terms of a weight's gradient: a whole weight that meets a part of an activation."""
        return self.weights[weight].is_replicate() and not self.activations[meets].is_replicate()


def megatron_sharding(*, sequence_parallel: bool) -> Sharding:
    """Columns, then rows; residuals and norms whole, or split over the positions."""
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
    """Moves activations from one placement to another.

    Args:
        sharding: The table.
        mesh: The tensor-parallel ranks; None for one rank alone.
        index: The place of this rank among them.
    """

    def __init__(self, sharding: Sharding, mesh: DeviceMesh | None, index: int) -> None:
        self.sharding = sharding
        self.mesh = mesh
        self.index = index

    @property
    def size(self) -> int:
        """Tensor-parallel ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    def move(self, tensor: Tensor, source: str, target: str) -> Tensor:
        """This rank's part of an activation under the role `target`, from its part under `source`.

        What is done to a whole activation differs from rank to rank, so that its gradients are terms of a sum.
        """
        if self.mesh is None:
            return tensor
        have, want = self.sharding.activations[source], self.sharding.activations[target]
        moved = DTensor.from_local(tensor, self.mesh, [have], run_check=False).redistribute(placements=[want])
        gradient = Partial() if want.is_replicate() and not have.is_partial() else want
        return moved.to_local(grad_placements=[gradient])
