"""Profiler of training steps, based on torch's profiler; execution_samples.py interprets the profile.

The profiler's events are nested here, because torch's own conversion takes 0.1 ms for each event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch._C._autograd import DeviceType, _KinetoEvent  # torch.autograd has them, but its types do not say so
from torch.profiler import ProfilerActivity, profile

from trials.profiling.operator_profile import RankProfile
from trials.profiling.trace_events import TraceEvent
from trials.torch_training.profiling.execution_samples import read_profile

_OF_PROFILER = ("profiler::", "[")
"""Prefixes of the names of the profiler's own events."""


def profile_steps(step: Callable[[], object], device: torch.device, *, num_steps: int = 1) -> RankProfile:
    """Return the operators of one step on this rank. All ranks must profile the same steps.

    On a CPU the profiler adds 1 to 5 us to every event, which the times include. On a GPU the kernels are timed. The
    executions of `num_steps` steps are counted and timed together; the first step of a process is not typical.
    """
    has_kernels = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_kernels else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(num_steps):
            step()
    assert profiler.profiler is not None, "a profiler that has run has results"
    results = profiler.profiler.kineto_results
    assert results is not None, "a profiler that has run has results"
    return read_profile(_nest_events(results.events(), has_kernels=has_kernels), num_steps=num_steps)


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenEvent:
    """An event that may still get children."""

    event: _KinetoEvent
    children: list[_OpenEvent] = field(default_factory=list)

    def close(self, kernels_ns: Mapping[int, int] | None) -> TraceEvent:
        """Return the event with all its children; its own time is that of its kernels on a device with kernels."""
        event = self.event
        # On a CPU an event's own time is its duration without its children; on a GPU it is that of the kernels it
        # launched.
        if kernels_ns is None:
            own_ns = event.duration_ns() - sum(child.event.duration_ns() for child in self.children)
        else:
            own_ns = kernels_ns.get(event.correlation_id(), 0)
        return TraceEvent(
            name=event.name(),
            own_s=1e-9 * own_ns,
            shapes=tuple(tuple(shape) for shape in event.shapes()),
            thread=event.start_thread_id(),
            sequence=event.sequence_nr(),
            forward_thread=event.fwd_thread_id(),
            children=tuple(child.close(kernels_ns) for child in self.children),
        )


def _nest_events(events: Iterable[_KinetoEvent], *, has_kernels: bool) -> tuple[TraceEvent, ...]:
    """Return the host events without a parent, in the order of their start, with all their descendants."""
    of_host: list[_KinetoEvent] = []
    kernels_ns: dict[int, int] = defaultdict(int)
    for event in events:
        if event.device_type() != DeviceType.CPU:
            kernels_ns[event.linked_correlation_id()] += event.duration_ns()
        elif not _is_hidden(event) and not event.linked_correlation_id():  # linked: calls of the device's library
            of_host.append(event)
    roots: list[_OpenEvent] = []
    around: dict[int, list[_OpenEvent]] = defaultdict(list)
    # Parents come before their children: earlier start, or equal start and later end.
    for event in sorted(of_host, key=lambda event: (event.start_ns(), -event.end_ns())):
        open_events = around[event.start_thread_id()]
        # Close the events that end before this one; the last open one that remains is its parent.
        while open_events and open_events[-1].event.end_ns() < event.end_ns():
            open_events.pop()
        opened = _OpenEvent(event=event)
        (open_events[-1].children if open_events else roots).append(opened)
        open_events.append(opened)
    return tuple(root.close(kernels_ns if has_kernels else None) for root in roots)


def _is_hidden(event: _KinetoEvent) -> bool:
    """Return whether an event is the profiler's own, or belongs to no single thread."""
    is_async = event.is_async() or event.start_thread_id() != event.end_thread_id()
    return is_async or event.is_hidden_event() or event.name().startswith(_OF_PROFILER)
