"""Process groups on gloo that record the compute and the communication of their rank.

A trainer registers the backend, trains as usual, and requests the recording of any step:

    recorder = register_recorded_backend()
    dist.init_process_group("recorded", ...)
    recorder.start()
    train_one_step()
    recording = recorder.stop()

Compute is the CPU time of the training thread between its calls and waits. All compute runs on that thread if
OMP_NUM_THREADS=1 and the tensors are on the CPU, whose backward pass runs in the calling thread. Excluded is the cost
of the call itself on that thread: gloo's copies and hand-over, the wait, which uses no CPU, and the recorder. On an
accelerator, a collective costs the kernels' stream nothing of the kind. The link model gives the duration of a call
(virtual_clock.py). The Python code of torch.distributed around a call is included, like all Python code of a trainer.
Other ranks on the same cores affect this time only through caches and memory.

All calls of a group pass through this module: torch.distributed, functional collectives with or without autograd,
DTensor, FSDP2, pipelining. gloo has no streams. A blocking call therefore stops its rank even where an accelerator
would run it beside the kernels, as for FSDP2's reductions. Calls that the link model lacks are recorded as the nearest
kind that it has (assumed): a broadcast and a gather as an all-gather of the whole, a reduce and a scatter as a
reduce-scatter, a barrier as an empty all-reduce.

Limits of the recording:

- Code that takes a call's future may wait for it unseen, so taking the future is recorded as the wait.
  DistributedDataParallel does this: its gradients look as if nothing overlapped with them.
- A call that is polled until completion is recorded without a wait.
- A receive from any source, and a call from a thread that did not start the step, raise an error while a step is
  recorded.
- Python cannot override the C++ single-tensor calls `_allgather_base` and `_reduce_scatter_base` of
  torch._C._distributed_c10d, nor `torch.ops.c10d.*`. In eager torch 2.13 only the `_out` forms of functional
  collectives use them; these work, but are not recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Work  # torch.distributed has them, but its types do not say so

from costmodels.blocks.operator import OpKind
from trials.torch_training.profiling.rank_recording import Computed, Event, Issued, RankGroup, RankRecording, Waited

BACKEND = "recorded"
"""Name of the backend for `init_process_group` and `new_group`."""

NO_LIMIT = timedelta(0)
"""Timeout that torch passes for a wait without a limit of its own."""


class Recorder:
    """Recorder of one rank's groups between `start` and `stop`; it costs almost nothing outside.

    Args:
        clock: Function for the CPU time of the calling thread [s].

    Attributes:
        step: Number of the step that is recorded, or of the last one; counted from 1.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._events: list[Event] | None = None
        self.step = 0
        self._num_calls = 0
        self._settled: set[int] = set()  # calls whose wait is already recorded
        self._since_s = 0.0
        self._thread = 0

    @property
    def is_on(self) -> bool:
        """Whether a step is being recorded."""
        return self._events is not None

    def start(self) -> None:
        """Begin to record a step."""
        assert not self.is_on, "a step is being recorded already"
        self._events = []
        self.step += 1
        self._num_calls = 0
        self._settled.clear()
        self._thread = threading.get_ident()
        self._since_s = self._clock()

    def stop(self) -> RankRecording:
        """End the step and return its recording."""
        self.pause()
        assert self._events is not None, "no step is being recorded: call start() first"
        recording = RankRecording(rank=dist.get_rank(), events=tuple(self._events))
        self._events = None
        return recording

    def pause(self) -> None:
        """Record the compute so far; the time until `resume` belongs to a call."""
        now_s = self._clock()
        assert self._events is not None, "no step is being recorded: call start() first"
        if threading.get_ident() != self._thread:
            raise RuntimeError("a step is recorded on the thread that started it, but another thread communicates")
        self._events.append(Computed(cpu_s=now_s - self._since_s))

    def resume(self) -> None:
        """Begin to measure compute again."""
        self._since_s = self._clock()

    def issue(self, kind: OpKind, message_bytes: int, group: RankGroup, ends: tuple[int, int] | None, tag: int) -> int:
        """Record a call and return its number."""
        assert self._events is not None, "no step is being recorded: call start() first"
        call = self._num_calls
        self._num_calls += 1
        self._events.append(Issued(call=call, kind=kind, message_bytes=message_bytes, group=group, ends=ends, tag=tag))
        return call

    def wait(self, call: int) -> None:
        """Record a wait for a call."""
        assert self._events is not None, "no step is being recorded: call start() first"
        self._settled.add(call)
        self._events.append(Waited(call=call))

    def awaits(self, step: int, call: int) -> bool:
        """Return whether a wait for this call still has to be recorded."""
        return self.is_on and step == self.step and call not in self._settled


def register_recorded_backend(clock: Callable[[], float] = time.thread_time) -> Recorder:
    """Register "recorded" as a backend of torch.distributed for CPU tensors, and return its recorder.

    This can be done once per process.
    """
    recorder = Recorder(clock)

    def create(options: Any, _: Any) -> _RecordedGroup:
        return _RecordedGroup(recorder, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return recorder


class _Message(NamedTuple):
    """Location of the message in a call's arguments.

    Attributes:
        kind: Kind under which the call is recorded.
        arguments: Positions of arguments that hold tensors; the larger one counts.
        per_member: Whether the tensors are only the part of one member of the group.
    """

    kind: OpKind
    arguments: tuple[int, ...]
    per_member: bool = False


_COLLECTIVES = {
    "allreduce": _Message(OpKind.ALL_REDUCE, (0,)),
    "allreduce_coalesced": _Message(OpKind.ALL_REDUCE, (0,)),
    "allgather": _Message(OpKind.ALL_GATHER, (0,)),
    "allgather_coalesced": _Message(OpKind.ALL_GATHER, (0,)),
    "all_gather_single": _Message(OpKind.ALL_GATHER, (0,)),
    "_allgather_base": _Message(OpKind.ALL_GATHER, (0,)),
    "all_gather_single_coalesced": _Message(OpKind.ALL_GATHER, (0,)),
    "allgather_into_tensor_coalesced": _Message(OpKind.ALL_GATHER, (0,)),
    "reduce_scatter": _Message(OpKind.REDUCE_SCATTER, (1,)),
    "reduce_scatter_single": _Message(OpKind.REDUCE_SCATTER, (1,)),
    "_reduce_scatter_base": _Message(OpKind.REDUCE_SCATTER, (1,)),
    "reduce_scatter_single_coalesced": _Message(OpKind.REDUCE_SCATTER, (1,)),
    "reduce_scatter_tensor_coalesced": _Message(OpKind.REDUCE_SCATTER, (1,)),
    "all_to_all_single": _Message(OpKind.ALL_TO_ALL, (0, 1)),
    "alltoall_base": _Message(OpKind.ALL_TO_ALL, (0, 1)),
    "alltoall": _Message(OpKind.ALL_TO_ALL, (0, 1)),
    "broadcast": _Message(OpKind.ALL_GATHER, (0,)),
    "gather": _Message(OpKind.ALL_GATHER, (1,), per_member=True),
    "reduce": _Message(OpKind.REDUCE_SCATTER, (0,)),
    "scatter": _Message(OpKind.REDUCE_SCATTER, (0,), per_member=True),
    "barrier": _Message(OpKind.ALL_REDUCE, ()),
}
"""Collectives of a process group, by their names in torch 2.13 and earlier."""


class _RecordedGroup(dist.ProcessGroup):
    """Group that forwards its calls to an inner group on gloo, and to the recorder."""

    def __init__(self, recorder: Recorder, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg] # the form for subclasses; its stub is missing
        gloo = ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._recorder = recorder
        self._inner = _attach_gloo(dist.ProcessGroup(options.store, rank, size), gloo)
        _attach_gloo(self, gloo)  # keeps gloo's name, and serves calls that can't be overridden
        self._group = RankGroup(name=options.group_id, ranks=tuple(options.global_ranks_in_group) or tuple(range(size)))

    def collective(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a collective of the inner group and return its work."""
        method = getattr(self._inner, name)
        if not self._recorder.is_on:
            return method(*arguments, **named)
        kind, positions, per_member = _COLLECTIVES[name]
        parts = len(self._group.ranks) if per_member else 1
        message_bytes = parts * max((_count_bytes(arguments[at]) for at in positions), default=0)
        return self._record_call(method, arguments, named, kind, message_bytes)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803 # torch calls it so
        return self._pass_message(self._inner.send, tensors, dstRank, tag, ends=(self.rank(), dstRank))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803 # torch calls it so
        return self._pass_message(self._inner.recv, tensors, srcRank, tag, ends=(srcRank, self.rank()))

    def _pass_message(
        self, method: Callable[..., Any], tensors: list[torch.Tensor], other: int, tag: int, *, ends: tuple[int, int]
    ) -> Any:
        """Send or receive tensors; sender and receiver are numbered in the group."""
        if not self._recorder.is_on:
            return method(tensors, other, tag)
        sender, receiver = (self._group.ranks[end] for end in ends)
        size = _count_bytes(tensors)
        return self._record_call(method, (tensors, other, tag), {}, OpKind.SEND_RECV, size, (sender, receiver), tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Receive tensors from any member; not possible while a step is recorded."""
        if self._recorder.is_on:
            raise RuntimeError("a receive from any source can't be recorded; name the source")
        return self._inner.recv_anysource(tensors, tag)

    def _record_call(
        self,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        kind: OpKind,
        message_bytes: int,
        ends: tuple[int, int] | None = None,
        tag: int = 0,
    ) -> Any:
        """Run a call of the inner group, and record it without its CPU time."""
        self._recorder.pause()
        try:
            call = self._recorder.issue(kind, message_bytes, self._group, ends, tag)
            return _RecordedWork(method(*arguments, **named), self._recorder, call)
        finally:
            self._recorder.resume()


def _make_forwarder(name: str) -> Callable[..., Any]:
    def call(self: _RecordedGroup, *arguments: Any, **named: Any) -> Any:
        return self.collective(name, arguments, named)

    return call


for _name in _COLLECTIVES:
    setattr(_RecordedGroup, _name, _make_forwarder(_name))


class _RecordedWork(Work):
    """A call in progress, with the interface of torch's Work."""

    def __init__(self, work: Work, recorder: Recorder, call: int) -> None:
        super().__init__()
        self._work, self._recorder = work, recorder
        self._step, self._call = recorder.step, call

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for the call, and record the wait once."""
        if not self._recorder.awaits(self._step, self._call):
            return self._work.wait(timeout)
        self._recorder.pause()
        try:
            self._recorder.wait(self._call)
            return self._work.wait(timeout)
        finally:
            self._recorder.resume()

    def get_future(self) -> Any:
        if self._recorder.awaits(self._step, self._call):
            self._recorder.pause()
            self._recorder.wait(self._call)
            self._recorder.resume()
        return self._work.get_future()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()


def _attach_gloo(group: dist.ProcessGroup, gloo: ProcessGroupGloo) -> dist.ProcessGroup:
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def _count_bytes(tensors: torch.Tensor | Iterable[Any]) -> int:
    """Return the size of a tensor, or of all tensors in a nested list [bytes]."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_count_bytes, tensors))
