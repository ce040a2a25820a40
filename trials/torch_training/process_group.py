"""Process group of a trial's ranks: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but its types do not say so

from trials.ranks.messages import Place

TIMEOUT_S = 600.0
"""Time that a collective waits for the other ranks [s]. A trial's own limit comes first; this one is for orphans."""


@contextlib.contextmanager
def process_group(place: Place, device: str, backend: str | None = None) -> Iterator[torch.device]:
    """Form the group of all ranks, yield the device of this rank, and destroy the group if all went well.

    A rank that fails ends without destroying it, because the others may wait for the rank in a collective.

    Args:
        place: Place of this rank in the trial.
        device: Kind of device: `cpu` or `cuda`.
        backend: Name of torch's communication backend; None for the device's own.
    """
    torch.set_num_threads(1)
    found = torch.device(device, place.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(found)
    elif place.host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(
        place.host,
        place.port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        master_listen_fd=place.listening,
        wait_for_workers=False,
    )
    dist.init_process_group(
        backend or ("nccl" if device == "cuda" else "gloo"),
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    yield found
    dist.destroy_process_group()
