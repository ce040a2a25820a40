"""Targets: what trials leave: logs, and traces of torch.profiler."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import of_bytes, of_json, of_lines
from tests.fuzz.target import Target
from trials.backend import ignore_start, ignore_step
from trials.command.host_program import Ended
from trials.command.kineto import UnreadableTraceError, read_trace
from trials.command.log_pattern import LOG_PATTERNS, Reading, StepSize
from trials.command.log_watch import Wanted, watch_log
from trials.command.slurm.job_program import end_of
from trials.command.slurm.nodes import read_nodes
from trials.command.slurm.queue import QueueError, read_state
from trials.command.trace_samples import find_samples
from trials.ranks.contract import AbstractRanks
from trials.ranks.messages import Exit, Told
from tuner.watch.hosts import Node, Seat, take_seats

STEP = StepSize(samples=256, tokens=256 * 4096, devices=64)

NODES = (
    b"NodeName=node01 Arch=x86_64 CPUTot=96 Gres=gpu:h100:8(S:0-1) NodeAddr=10.0.0.1 State=IDLE+DRAIN Reason=a b\n"
    b"NodeName=node9 CPUTot=96 Gres=(null) State=MIXED Version=22.05.8\nNodeName=node10 CPUTot=8 State=IDLE\n",
)

JOBS = (
    b"JobId=2 JobName=j.sh JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=3:0 TimeLimit=1-00:00:00 A=\n",
    b"JobId=3 JobName=k JobState=RUNNING Reason=None Restarts=2 ExitCode=0:9 TimeLimit=UNLIMITED Power=\n",
)
LOGS = (
    b" [2026-01-02 03:04:05] iteration       10/     100 | consumed samples:  2560 | elapsed time per iteration (ms): "
    b"1234.5 | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 3.0E-04 | global batch size:   256 | lm loss: "
    b"1.2E+00 |\n[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: 3.0 | "
    b"max reserved: 40000.0\n",
    b"[titan] 2026-01-02 03:04:05,678 - root - INFO - \x1b[31mstep: 10 \x1b[32mloss: 7.1  \x1b[33mmemory: "
    b"35.12GiB(44.2%)  \x1b[34mtps: 7,012  \x1b[36mtflops: 400.00  \x1b[35mmfu: 40.00%\x1b[39m\n",
    b"[INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10, RunningAvgSamplesPerSec=1.5, "
    b"CurrSamplesPerSec=1.6, MemAllocated=10.0GB, MaxMemAllocated=20.1GB\n",
    b"Training epoch 0, iteration 10/99 | lr: 0.0001 | global_batch_size: 16 | global_step: 10 | "
    b"peak_memory_usage: 40000000000 | memory_allocated: 3 | reduced_train_loss: 11.0 | train_step_timing in s: 1.25\n",
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB\n"
    b"slurmstepd: error: Detected 1 oom_kill event in StepId=1.0\ntask 0,3-5: Out Of Memory\nMemoryError: x\n"
    b"RuntimeError: [Errno 12] Cannot allocate memory\nwhat():  std::bad_alloc\n",
    b"ValueError: bad\nexitcode  : -9 (pid: 5)\nSignal 11 (SIGSEGV) received by PID 5\nEADDRINUSE: address in use\n",
)


def _operation(name: str, begin_us: float, took_us: float, **arguments: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 1, "ts": begin_us, "dur": took_us}
    return {**event, "args": arguments}


def _trace() -> bytes:
    """A step with products, norms and attention, and kernels of some."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    launch = {"External id": 1, "correlation": 1}
    events = [
        {**_operation("ProfilerStep#7", 0, 1000), "cat": "user_annotation"},
        _operation("aten::linear", 10, 20, **{"Input Dims": [[2, 32, 64], [256, 64], []], "Sequence number": 5}),
        _operation("aten::mm", 12, 10, **{"Input Dims": [[64, 64], [64, 256]], "Sequence number": 5, "External id": 1}),
        {**_operation("cudaLaunchKernel", 13, 1, **launch), "cat": "cuda_runtime"},
        {**_operation("sm90_gemm", 5001, 300, device=0, stream=7, **launch), "cat": "kernel", "pid": 0},
        _operation("aten::_scaled_dot_product_flash_attention", 40, 10, **{"Input Dims": [[2, 4, 32, 16]] * 3}),
        _operation("aten::native_layer_norm", 60, 10, **{"Input Dims": [[2, 32, 64], [], [64], [64], []]}),
        _operation("aten::bmm", 80, 10, **{"Input Dims": [[2, 32, 64], [2, 64, 8]]}),
        _operation(node, 100, 30, **{"Sequence number": 5}),
        _operation("aten::mm", 105, 10, **{"Input Dims": [[64, 256], [256, 64]]}),
    ]
    return json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()


class _Ended(AbstractRanks):
    """One host that has printed a log and failed."""

    def __init__(self, text: str, readings: Sequence[Reading]) -> None:
        self.text = text
        self.left = [Told(rank=0, value=reading) for reading in readings]
        self.left.append(Told(rank=0, value=Ended(code=1)))

    def start(self) -> _Ended:
        return self

    @property
    def running(self) -> frozenset[int]:
        return frozenset({0} if self.left else ())

    def launch(self, *_: Any, **_options: Any) -> None:
        raise AssertionError("it has ended")

    def events(self, timeout_s: float) -> list[Told | Exit]:  # noqa: ARG002 # nobody waits
        left, self.left = self.left, []
        return list(left)

    def printed(self) -> str:
        return self.text

    def kill(self) -> list[Exit]:
        return []

    def close(self) -> None:
        self.left = []


def _read_job(data: bytes, folder: Path) -> None:  # noqa: ARG001 # no file is read
    """As a trial reads what scontrol prints of its job."""
    end_of("1", read_state(data.decode(errors="replace")), Path())


def _read_nodes(data: bytes, folder: Path) -> None:  # noqa: ARG001 # no file is read
    """As a watch reads what scontrol prints of the nodes."""
    nodes = [
        Node(name=one.name, identity="", devices=one.gpus or one.cpus) for one in read_nodes(data.decode()) if one.is_up
    ]
    take_seats((Seat(), Seat()), (8, 1), nodes)


def _read_log(data: bytes, folder: Path) -> None:  # noqa: ARG001 # no file is read
    """As a host reads what a command prints, and its driver what is left of it."""
    text = data.decode(errors="replace")
    lines = text.split("\n")
    for pattern in LOG_PATTERNS.values():
        found = [reading for line in lines if (reading := pattern.reading(line, STEP)) is not None]
        watch_log(
            _Ended(text, found),
            Wanted(warmup_steps=1, steps=100, hang_limit_s=1.0),
            on_step=ignore_step,
            on_start=ignore_start,
        )


def _read_profile(data: bytes, folder: Path) -> None:
    path = folder / "rank0.pt.trace.json"
    path.write_bytes(data)
    find_samples(read_trace(path))


def _read_packed(data: bytes, folder: Path) -> None:
    path = folder / "rank0.pt.trace.json.gz"
    path.write_bytes(data)
    find_samples(read_trace(path))


TARGETS = (
    Target(name="slurm", read=_read_job, mutation=of_lines, seeds=lambda: JOBS, refusals=(QueueError,)),
    Target(
        name="nodes of Slurm",
        read=_read_nodes,
        mutation=of_lines,
        seeds=lambda: NODES,
        refusals=(QueueError, UnicodeDecodeError),
    ),
    Target(name="log", read=_read_log, mutation=of_lines, seeds=lambda: LOGS),
    Target(
        name="profile of a step",
        read=_read_profile,
        mutation=of_json,
        seeds=lambda: (_trace(),),
        refusals=(UnreadableTraceError,),
    ),
    Target(
        name="packed profile of a step",
        read=_read_packed,
        mutation=of_bytes,
        seeds=lambda: (gzip.compress(_trace(), mtime=0),),
        refusals=(UnreadableTraceError,),
    ),
)
