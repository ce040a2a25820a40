"""Runs one collective among all ranks of a process group, as often as its time needs to be known.

Messages are as hardware/collectives.py has them. A run is a batch of the same collective one after the other, so that
what ranks are apart when they leave a barrier is shared by many; its time is that of the slowest rank. Letters: n
ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from costmodels.operators.isolated import LoneCall
from costmodels.operators.layer_operators import OpKind
from trials.torch_training.benchmarks.messages import Timing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}

BATCH_S = 5e-3
"""What a batch should take."""
MOST_IN_BATCH = 50
FEWEST_BATCHES, MOST_BATCHES = 5, 20
LEAST_S = 0.05
"""Batches go on until they are FEWEST_BATCHES and have probably taken so long."""


def time_collective(call: LoneCall, device: torch.device) -> Timing:
    """The median over batches of what the slowest rank took for one collective; the same on every rank."""
    run = collective(call, device)
    estimate_s = _slowest(_batch_s(run, 2, device), device)
    estimate_s = _slowest(_batch_s(run, 2, device), device)
    in_batch = min(max(round(BATCH_S / estimate_s), 1), MOST_IN_BATCH)
    batches = min(max(round(LEAST_S / (in_batch * estimate_s)), FEWEST_BATCHES), MOST_BATCHES)
    times_s = [_slowest(_batch_s(run, in_batch, device), device) for _ in range(batches)]
    return Timing(time_s=statistics.median(times_s), runs=batches * in_batch)


def collective(call: LoneCall, device: torch.device) -> Callable[[], object]:
    """The collective on buffers of its message, of which every rank's part has at least one element."""
    dtype, n = DTYPES[call.precision], dist.get_world_size()
    part = max(1, round(call.shape[0] / dtype.itemsize / n))
    whole = torch.ones(n * part, dtype=dtype, device=device)
    own = torch.ones(part, dtype=dtype, device=device)
    match call.kind:
        case OpKind.ALL_REDUCE:
            return lambda: dist.all_reduce(whole)
        case OpKind.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(whole, own)
        case OpKind.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(own, whole)
        case OpKind.ALL_TO_ALL:
            arriving = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(arriving, whole)
        case OpKind.SEND_RECV:
            return _ring_hop(whole)
    raise AssertionError(f"{call.kind} is no collective")


def _ring_hop(message: torch.Tensor) -> Callable[[], object]:
    """Every rank sends a message to the next one, and receives one."""
    n, rank = dist.get_world_size(), dist.get_rank()
    arriving = torch.empty_like(message)
    hop = [
        dist.P2POp(dist.isend, message, (rank + 1) % n),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % n),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(hop):
            work.wait()

    return run


def _batch_s(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean time of `count` runs on this rank."""
    dist.barrier()
    _finish(device)
    start_s = time.perf_counter()
    for _ in range(count):
        run()
    _finish(device)
    return (time.perf_counter() - start_s) / count


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(time_s: float, device: torch.device) -> float:
    found = torch.tensor(time_s, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
