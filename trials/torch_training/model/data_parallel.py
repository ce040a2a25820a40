"""Data parallelism: FSDP2 over the ranks that hold the same weights, at every ZeRO stage.

ZeRO 0 is FSDP2 with shards over one rank each, and all-reduced gradients. Stages 0 and 1 reduce gradients once per
step. Stages 2 and 3 reduce them after every micro-batch, except between copies of the shards, where it is once per
step. Weights are gathered once per step, and at stage 3 for every pass. All gradients are sums, never means, because
the loss is divided by the tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trials.torch_training.model.experts import Experts
from trials.torch_training.model.mesh import RankMesh
from trials.torch_training.model.stage_model import Chunk

_DENSE = ("copies", "shards")
_EXPERTS = ("expert_copies", "expert_shards")

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Replicated(nn.Module):
    """A chunk with sharded or replicated weights, which detects the backward pass of a step's last micro-batch.

    Args:
        chunk: Chunk of the model.
        zero_stage: ZeRO stage of the configuration.
        num_micro_batches: Number of backward passes per step.
    """

    def __init__(self, chunk: Chunk, *, zero_stage: int, num_micro_batches: int) -> None:
        super().__init__()
        self.chunk = chunk
        self._zero_stage = zero_stage
        self._num_micro_batches = num_micro_batches
        self._num_backward = 0
        self._sharded = [part for part in chunk.modules() if isinstance(part, FSDPModule)]

    def forward(self, x: Tensor) -> Tensor:
        """Run the chunk."""
        y: Tensor = self.chunk(x)
        if self._sharded and y.requires_grad:
            y.register_hook(self._before_backward)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return y

    def _before_backward(self, gradient: Tensor) -> Tensor:
        """Switch FSDP's communication for the backward pass that begins with this gradient."""
        # Count backward passes cyclically; the last one of a step reduces all gradients.
        self._num_backward = self._num_backward % self._num_micro_batches + 1
        is_last = self._num_backward == self._num_micro_batches
        for part in self._sharded:
            part.set_requires_gradient_sync(is_last or self._zero_stage >= 2, recurse=False)
            part.set_requires_all_reduce(is_last, recurse=False)
            part.set_reshard_after_backward(is_last or self._zero_stage == 3, recurse=False)
        return gradient


def replicate(
    chunks: Sequence[Chunk], mesh: RankMesh, *, zero_stage: int, precision: str, num_micro_batches: int
) -> list[Replicated]:
    """Return the chunks with their weights shared among replicas, computing in the job's precision."""
    dtype = NARROW.get(precision, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    for chunk in chunks:
        # inner modules come first: FSDP leaves to the modules around them what they have not taken
        alone = set[nn.Parameter]()  # expert weights that no other rank holds
        for part in chunk.modules():
            if isinstance(part, Experts) and not _shard(part, mesh, _EXPERTS, zero_stage, policy):
                alone.update(part.parameters())
        for layer in (*chunk.layers, chunk):
            _shard(layer, mesh, _DENSE, zero_stage, policy, ignored=alone)
    return [Replicated(chunk, zero_stage=zero_stage, num_micro_batches=num_micro_batches) for chunk in chunks]


def _shard(
    module: nn.Module,
    mesh: RankMesh,
    dimensions: tuple[str, str],
    zero_stage: int,
    policy: MixedPrecisionPolicy | None,
    ignored: set[nn.Parameter] | None = None,
) -> bool:
    """Apply FSDP2 to the module's own weights, and return whether it was needed.

    It is not needed if one rank alone holds the weights and no cast is to be done.
    """
    copies, shards = dimensions
    if mesh.size(copies) * mesh.size(shards) == 1 and policy is None:
        return False
    # with a mesh of two dims FSDP2 shards along the second and keeps copies along the first (HSDP)
    used = (copies, shards) if mesh.size(copies) > 1 else (shards,)
    fully_shard(
        module,
        mesh=mesh.device_mesh(*used),
        reshard_after_forward=zero_stage == 3,
        mp_policy=policy or MixedPrecisionPolicy(),
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule), "fully_shard turns the module into one"
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    return True
