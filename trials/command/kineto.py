"""Read a trace that torch.profiler exported as JSON: nested operations, with the time of their kernels.

The file is in the trace event format of Chrome with the categories of Kineto. These parts of it are read (sources:
traces of GPUs in pytorch/kineto, docs/traces/after_fix_trace.json, and facebookresearch/HolisticTraceAnalysis,
tests/data/call_stack/backward_thread.json):

- `traceEvents` has complete events (`"ph": "X"`), with `ts` and `dur` in microseconds; events of one `pid` and `tid`
  nest.
- Operations have the category `cpu_op` (formerly `Operator`), and ranges of the program `user_annotation`. Their `args`
  have `Input Dims` if shapes were recorded, and `Sequence number`.
- Kernels, copies and fills of a GPU are `kernel`, `gpu_memcpy` and `gpu_memset`. The call that launched one is of
  `cuda_runtime` or `cuda_driver`, has the same `correlation`, and lies inside its operation on the operation's thread.
  If that call is missing, `External id` may be that of the operation itself. ROCm's traces have the same categories.
- A profiled step is a range `ProfilerStep#7`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError, quote_value
from hardware.io.input_file import read_input, unpack
from trials.profiling.trace_events import Shape, TraceEvent

MOST_BYTES = 1_000_000_000
"""Largest trace that is read [bytes]; as Python objects it takes several times as much memory."""

_OPERATIONS = ("cpu_op", "Operator", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime")
_STEP = "ProfilerStep#"
_MOST_NESTED = 250
"""Deepest nesting of operations: a program has dozens of levels, and the code that reads them recurses as deep."""
_MOST_DIMS, _LARGEST_DIM = 16, 2**53
"""Limits of a tensor: more than any has, and few enough for its elements to be counted as a float."""
_LONGEST_US = 1e18
_ROUNDING_US = 0.01
"""Tolerance between the ends of nested operations [us]: times of some 10**12 us are rounded to 0.001."""


class UnreadableTraceError(Exception):
    """Failure to read a trace, with its reason in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Content of a trace.

    Attributes:
        events: Outermost operations, thread by thread in the order of their start.
        num_steps: Number of steps that were profiled.
        has_kernels: Whether times are those of kernels on a device.
        total_s: Time of all kernels, or of all operations if there are no kernels [s].
    """

    events: tuple[TraceEvent, ...]
    num_steps: int
    has_kernels: bool
    total_s: float


def read_trace(path: Path) -> Trace:
    """Read a trace, packed or not.

    Raises:
        UnreadableTraceError: The file is no trace of torch.profiler.
    """
    try:
        content = unpack(read_input(path, most_bytes=MOST_BYTES), most_bytes=MOST_BYTES, path=path)
        found = json.loads(content.decode(errors="replace"), strict=False)
    except ConfigError as error:
        advice = "profile one step, without stacks and memory" if "larger" in error.rule else error.nearest
        raise UnreadableTraceError("; ".join(filter(None, (error.rule, advice)))) from None
    except ValueError as error:
        raise UnreadableTraceError(f"is not JSON, or is incomplete ({error})") from None
    except RecursionError:
        raise UnreadableTraceError("is not a trace: its JSON is nested too deeply") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise UnreadableTraceError("has no traceEvents")
    try:
        return build_trace([event for event in events if isinstance(event, dict) and event.get("ph") == "X"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnreadableTraceError(f"has an event that torch.profiler does not write ({quote_value(error)})") from None


def build_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Build a trace from complete events."""
    kernels: list[Mapping[str, Any]] = []
    on_threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    num_steps = 0
    for event in events:
        category = event.get("cat")
        if category in _ON_DEVICE:
            kernels.append(event)
        elif category in _OPERATIONS or category in _LAUNCHES:
            on_threads[event["pid"], event["tid"]].append(event)
            num_steps += category == "user_annotation" and str(event["name"]).startswith(_STEP)
    # a kernel belongs to the call that launched it; without that call in the trace, to the operation it names
    has_kernels = bool(kernels)
    by_launch: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        by_launch[kernel["args"].get("correlation")] += _us(kernel, "dur")
    launched = {
        event["args"]["correlation"]
        for thread in on_threads.values()
        for event in thread
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    by_operation: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        if kernel["args"].get("correlation") not in launched:
            by_operation[kernel["args"].get("External id")] += _us(kernel, "dur")
    roots: list[TraceEvent] = []
    for number, thread in enumerate(on_threads.values()):
        opened = _nest(thread, by_launch)
        roots += (each.close(number, by_operation if has_kernels else None) for each in opened)
    total_us = sum(_us(kernel, "dur") for kernel in kernels)
    return Trace(
        events=tuple(roots),
        num_steps=max(num_steps, 1),
        has_kernels=has_kernels,
        total_s=1e-6 * total_us if has_kernels else sum(part.own_s for root in roots for part in root.whole()),
    )


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """Operation that is still collecting its children."""

    event: Mapping[str, Any]
    end_us: float
    kernels_us: float = 0.0
    children: list[_Open] = field(default_factory=list)

    def close(self, thread: int, by_operation: Mapping[Any, float] | None) -> TraceEvent:
        """Return the operation with all its children; on a device its own time is that of its kernels."""
        arguments = self.event.get("args", {})
        if by_operation is not None:
            is_linked = "External id" in arguments
            own_us = self.kernels_us + (by_operation.get(arguments["External id"], 0.0) if is_linked else 0.0)
        elif self.event["cat"] == "user_annotation":
            own_us = 0.0
        else:
            own_us = max(_us(self.event, "dur") - sum(_us(child.event, "dur") for child in self.children), 0.0)
        return TraceEvent(
            name=str(self.event["name"]),
            own_s=1e-6 * own_us,
            shapes=_shapes(arguments.get("Input Dims", arguments.get("Input dims", ()))),
            thread=thread,
            sequence=int(arguments.get("Sequence number", -1)),
            children=tuple(child.close(thread, by_operation) for child in self.children),
        )


def _nest(thread: Sequence[Mapping[str, Any]], by_launch: Mapping[Any, float]) -> list[_Open]:
    """Return the outermost operations of one thread; a kernel counts for the innermost operation around its launch."""
    # events sorted by start, longest first, form a stack: an event ends all that end before it does
    roots: list[_Open] = []
    around: list[_Open] = []
    for event in sorted(thread, key=lambda event: (_us(event, "ts"), -_us(event, "dur"))):
        end_us = _us(event, "ts") + _us(event, "dur")
        while around and around[-1].end_us < end_us - _ROUNDING_US:
            around.pop()
        if event["cat"] in _LAUNCHES:
            if around:
                around[-1].kernels_us += by_launch.get(event.get("args", {}).get("correlation"), 0.0)
            continue
        if len(around) == _MOST_NESTED:
            raise UnreadableTraceError(f"has operations nested deeper than {_MOST_NESTED} levels")
        opened = _Open(event=event, end_us=end_us)
        (around[-1].children if around else roots).append(opened)
        around.append(opened)
    return roots


def _us(event: Mapping[str, Any], key: str) -> float:
    """Return a time of an event [us], and raise ValueError if it is larger than any clock's."""
    time_us = float(event[key])
    if not abs(time_us) < _LONGEST_US:
        raise ValueError(f"{key} = {quote_value(event[key])}")
    return time_us


def _shapes(operands: Iterable[Any]) -> tuple[Shape, ...]:
    """Return the shape of each operand; empty for an operand that is no tensor, or a list of tensors."""
    return tuple(tuple(operand) if _is_shape(operand) else () for operand in operands)


def _is_shape(operand: Any) -> bool:
    is_short = isinstance(operand, list) and len(operand) <= _MOST_DIMS
    return is_short and all(type(size) is int and 0 <= size <= _LARGEST_DIM for size in operand)
