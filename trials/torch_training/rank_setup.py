"""Modules and variables that the ranks of a training trial find ready."""

from __future__ import annotations

from trials.ranks.contract import RankSetup

TORCH_RANKS = RankSetup(
    modules=(
        "torch",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "torch.profiler",
        "torch.utils.checkpoint",
        "trials.torch_training.rank_program",
    ),
    environment=(("OMP_NUM_THREADS", "1"),),
)
"""Setup that imports torch once for all ranks, and gives each rank one thread."""
