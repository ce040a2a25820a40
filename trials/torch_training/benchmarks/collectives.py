"""Benchmark of one collective among all ranks of a process group, repeated until its time is known.

Messages are defined in hardware/collectives.py. A run is a batch of the same collective one after the other, so that
the skew of the ranks after a barrier is spread over many. The time is that of the slowest rank. Letters: n ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from costmodels.blocks.operator import OpKind
from costmodels.operators.isolated import IsolatedCall
from trials.torch_training.benchmarks.messages import Timing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}

BATCH_S = 5e-3
"""Target time of a batch [s]."""
MOST_IN_BATCH = 50
FEWEST_BATCHES, MOST_BATCHES = 5, 20
LEAST_S = 0.05
"""Target time of all batches together [s]; there are at least FEWEST_BATCHES."""


def time_collective(call: IsolatedCall, device: torch.device) -> Timing:
    """Measure one collective: the median over batches of the slowest rank's time, equal on every rank."""
    run = collective(call, device)
    # The first estimate includes the warm-up (connections, allocations), so the second one counts.
    estimate_s = _max_over_ranks(_time_batch(run, 2, device), device)
    estimate_s = _max_over_ranks(_time_batch(run, 2, device), device)
    # Every rank has the same estimate, so all ranks run the same number of batches.
    in_batch = min(max(round(BATCH_S / estimate_s), 1), MOST_IN_BATCH)
    batches = min(max(round(LEAST_S / (in_batch * estimate_s)), FEWEST_BATCHES), MOST_BATCHES)
    times_s = [_max_over_ranks(_time_batch(run, in_batch, device), device) for _ in range(batches)]
    return Timing(time_s=statistics.median(times_s), runs=batches * in_batch)


def collective(call: IsolatedCall, device: torch.device) -> Callable[[], object]:
    """Return the collective on buffers of its message, in which every rank's part has at least one element."""
    dtype, n = DTYPES[call.precision], dist.get_world_size()
    # Round the message so that it divides evenly among the ranks.
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
    raise AssertionError(f"{call.kind} is not a collective")


def _ring_hop(message: torch.Tensor) -> Callable[[], object]:
    """Return a function with which every rank sends a message to the next one, and receives one."""
    n, rank = dist.get_world_size(), dist.get_rank()
    arriving = torch.empty_like(message)
    # Every rank sends and receives at the same time, as in ring attention.
    hop = [dist.P2POp(dist.isend, message, (rank + 1) % n), dist.P2POp(dist.irecv, arriving, (rank - 1) % n)]

    def run() -> None:
        for work in dist.batch_isend_irecv(hop):
            work.wait()

    return run


def _time_batch(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the mean time of `count` runs on this rank [s]."""
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


def _max_over_ranks(time_s: float, device: torch.device) -> float:
    """Return the largest of the ranks' times [s]."""
    found = torch.tensor(time_s, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
