"""Process groups on gloo that record what their rank computes and communicates.

A trainer registers the backend, trains as always, and asks for the recording of any step that it likes:

    recorder = register_recorded_backend()
    dist.init_process_group("recorded", ...)
    recorder.start()
    train_one_step()
    recording = recorder.stop()

What counts as compute is the CPU time of the thread that trains, between its calls and waits: all compute runs on it
where OMP_NUM_THREADS=1 and the tensors are on the CPU, whose backward pass runs in the calling thread. What is left
out is what a call itself costs that thread: gloo's copies and hand-over, the wait, which uses no CPU, and the recorder.
On an accelerator a collective costs the stream of the kernels nothing of that; how long the call takes is the link
model's to say (virtual_clock.py). The Python of torch.distributed around a call does count, as all of a trainer's
Python does. Other ranks on the same cores leave this time alone, but for what they take of caches and memory.

Every way into a group arrives here: torch.distributed, functional collectives with or without autograd, DTensor, FSDP2,
pipelining. gloo has no streams: a blocking call holds up its rank, also where an accelerator would run it beside the
kernels, as FSDP2's reductions. Calls that the link model does not know are recorded as the nearest that it knows
(assumed): a broadcast and a gather as an all-gather of the whole, a reduce and a scatter as a reduce-scatter, a barrier
as an empty all-reduce.

What can't be seen:

- Whoever takes a call's future may wait for it unseen; taking it is recorded as the wait. DistributedDataParallel does
  so: its gradients look as if nothing overlapped with them.
- A call that is polled until it is completed is recorded as not waited for.
- A receive from any source, and a call of a thread that did not start the step, raise while a step is recorded.
- From C++, torch._C._distributed_c10d's single-tensor calls `_allgather_base` and `_reduce_scatter_base` and what
  `torch.ops.c10d.*` offers can't be overridden from Python. Nothing in eager torch 2.13 takes these ways, but the
  `_out` forms of functional collectives do; they work, unrecorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed has them, but its types do not say so
    ProcessGroupGloo,
    Work,
)

from costmodels.operators.layer_operators import OpKind
from trials.torch_training.profiling.rank_recording import Computed, Event, Issued, RankGroup, RankRecording, Waited

BACKEND = "recorded"
"""The name for `init_process_group` and `new_group`."""

NO_LIMIT = timedelta(0)
"""What torch passes where a wait has no limit of its own."""


class Recorder:
    """Writes down what the groups of one rank do between `start` and `stop`; costs next to nothing outside.

    Args:
        clock: CPU time of the calling thread [s].
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._events: list[Event] | None = None
        self._step = 0
        self._num_calls = 0
        self._settled: set[int] = set()  # calls of which another wait is no news
        self._since_s = 0.0
        self._thread = 0

    @property
    def is_on(self) -> bool:
        """Whether it records."""
        return self._events is not None

    @property
    def step(self) -> int:
        """Number of the step that is recorded, or was last; from 1."""
        return self._step

    def start(self) -> None:
        """Begins to record a step."""
        assert not self.is_on, "one step after the other"
        self._events = []
        self._step += 1
        self._num_calls = 0
        self._settled.clear()
        self._thread = threading.get_ident()
        self._since_s = self._clock()

    def stop(self) -> RankRecording:
        """Ends the step; what was recorded."""
        self.pause()
        assert self._events is not None, "start it first"
        recording = RankRecording(rank=dist.get_rank(), events=tuple(self._events))
        self._events = None
        return recording

    def pause(self) -> None:
        """The rank computes no more, but calls."""
        now_s = self._clock()
        assert self._events is not None, "start it first"
        if threading.get_ident() != self._thread:
            raise RuntimeError("a step is recorded on the thread that started it, but another one communicates")
        self._events.append(Computed(cpu_s=now_s - self._since_s))

    def resume(self) -> None:
        """The rank computes again."""
        self._since_s = self._clock()

    def issue(self, kind: OpKind, message_bytes: int, group: RankGroup, ends: tuple[int, int] | None, tag: int) -> int:
        """Writes down a call; returns its number."""
        assert self._events is not None, "start it first"
        call = self._num_calls
        self._num_calls += 1
        self._events.append(Issued(call=call, kind=kind, message_bytes=message_bytes, group=group, ends=ends, tag=tag))
        return call

    def wait(self, call: int) -> None:
        """Writes down that a call was waited for."""
        assert self._events is not None, "start it first"
        self._settled.add(call)
        self._events.append(Waited(call=call))

    def awaits(self, step: int, call: int) -> bool:
        """Whether a wait for a call would be news."""
        return self.is_on and step == self._step and call not in self._settled


def register_recorded_backend(clock: Callable[[], float] = time.thread_time) -> Recorder:
    """Makes "recorded" a backend of torch.distributed in this process, once, for tensors on the CPU; its recorder."""
    recorder = Recorder(clock)

    def create(options: Any, _: Any) -> _RecordedGroup:
        return _RecordedGroup(recorder, options)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return recorder


class _Message(NamedTuple):
    """Where the message of a call stands.

    Attributes:
        kind: What the call is recorded as.
        arguments: Positions of arguments that hold tensors; the larger counts.
        per_member: Whether these are the part of one member of the group only.
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
"""The collectives of a process group, by their names in torch 2.13 and before."""


class _RecordedGroup(dist.ProcessGroup):
    """A group whose calls go to an inner group on gloo, and to the recorder; its collectives are those above."""

    def __init__(self, recorder: Recorder, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg] # the form for subclasses; its stub is missing
        gloo = ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._recorder = recorder
        self._inner = _on_gloo(dist.ProcessGroup(options.store, rank, size), gloo)
        _on_gloo(self, gloo)  # which keeps its name, and serves what can't be overridden
        self._group = RankGroup(name=options.group_id, ranks=tuple(options.global_ranks_in_group) or tuple(range(size)))

    def collective(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a collective of the inner group; its work."""
        method = getattr(self._inner, name)
        if not self._recorder.is_on:
            return method(*arguments, **named)
        kind, positions, per_member = _COLLECTIVES[name]
        parts = len(self._group.ranks) if per_member else 1
        message_bytes = parts * max((_bytes(arguments[at]) for at in positions), default=0)
        return self._recorded(method, arguments, named, kind, message_bytes)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803 # torch calls it so
        """Sends to a member of the group."""
        if not self._recorder.is_on:
            return self._inner.send(tensors, dstRank, tag)
        ends = (self._group.ranks[self.rank()], self._group.ranks[dstRank])
        return self._recorded(
            self._inner.send, (tensors, dstRank, tag), {}, OpKind.SEND_RECV, _bytes(tensors), ends, tag
        )

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803 # torch calls it so
        """Receives from a member of the group."""
        if not self._recorder.is_on:
            return self._inner.recv(tensors, srcRank, tag)
        ends = (self._group.ranks[srcRank], self._group.ranks[self.rank()])
        return self._recorded(
            self._inner.recv, (tensors, srcRank, tag), {}, OpKind.SEND_RECV, _bytes(tensors), ends, tag
        )

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Receives from anybody, unrecorded steps only."""
        if self._recorder.is_on:
            raise RuntimeError("a receive from any source can't be recorded; name the source")
        return self._inner.recv_anysource(tensors, tag)

    def _recorded(
        self,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        kind: OpKind,
        message_bytes: int,
        ends: tuple[int, int] | None = None,
        tag: int = 0,
    ) -> Any:
        self._recorder.pause()
        try:
            call = self._recorder.issue(kind, message_bytes, self._group, ends, tag)
            return _RecordedWork(method(*arguments, **named), self._recorder, call)
        finally:
            self._recorder.resume()


def _forward(name: str) -> Callable[..., Any]:
    def call(self: _RecordedGroup, *arguments: Any, **named: Any) -> Any:
        return self.collective(name, arguments, named)

    return call


for _name in _COLLECTIVES:
    setattr(_RecordedGroup, _name, _forward(_name))


class _RecordedWork(Work):
    """A call in flight; torch sees it as any other."""

    def __init__(self, work: Work, recorder: Recorder, call: int) -> None:
        super().__init__()
        self._work, self._recorder = work, recorder
        self._step, self._call = recorder.step, call

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
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


def _on_gloo(group: dist.ProcessGroup, gloo: ProcessGroupGloo) -> dist.ProcessGroup:
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def _bytes(tensors: torch.Tensor | Iterable[Any]) -> int:
    """Of a tensor, or of all in a list or a list of lists [bytes]."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))
