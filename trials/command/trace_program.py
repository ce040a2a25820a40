"""Program on each host after a trial that leaves traces: it finds the newest trace, and reads it.

The hosts need no file system in common, and nothing is read while steps are measured.
"""

from __future__ import annotations

import glob
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trials.backend import Observation, OperatorSample
from trials.command.host_program import HostPlan
from trials.command.kineto import UnreadableTraceError, read_trace
from trials.command.placeholders import fill_text
from trials.command.trace_samples import TraceSamples, find_samples
from trials.profiling.operator_profile import merge_samples
from trials.ranks.contract import AbstractRanks, RanksLostError
from trials.ranks.messages import Place, Told

READ_LIMIT_S = 300.0
"""Time that traces may take to be read [s]."""

CLOCKS_DIFFER_S = 60.0
"""Time by which a file may seem older than its trial [s], because the clocks of hosts and file servers differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundTrace:
    """Message with the trace that one host has found.

    Attributes:
        name: Name of the file; empty if there is none.
        trouble: Reason why the file cannot be used; empty if it can.
        found: Operators that the trace shows.
    """

    name: str = ""
    trouble: str = ""
    found: TraceSamples | None = None


def read_host(place: Place, plan: HostPlan, begun_s: float) -> None:
    """Send the operators of this host's newest trace; `begun_s` is the start of the trial since the epoch [s]."""
    assert plan.profile is not None, "only what was asked for is looked for"
    values = dict(plan.values) | {"host_rank": str(place.rank)}
    path = newest_trace(plan.profile_root, fill_text(plan.profile, values), begun_s=begun_s)
    if path is None:
        place.tell(FoundTrace())
        return
    try:
        place.tell(FoundTrace(name=path.name, found=find_samples(read_trace(path))))
    except UnreadableTraceError as error:
        place.tell(FoundTrace(name=path.name, trouble=str(error)))


def newest_trace(root: Path, where: str, *, begun_s: float) -> Path | None:
    """Return the newest trace of the files and folders that a pattern names; None if all are older than the trial.

    Args:
        root: Folder that `where` is relative to.
        where: Path of a file or folder, or a pattern with `*`, `?` or `**`.
        begun_s: Start of the trial since the epoch [s].
    """
    paths = [root / found for found in glob.glob(where, root_dir=root, recursive=True)]  # noqa: PTH207 # may be absolute
    inside = [path for folder in paths for path in folder.rglob("*") if path.name.endswith((".json", ".json.gz"))]
    written = [(path.stat().st_mtime, path) for path in (*paths, *inside) if path.is_file()]
    return max(((s, path) for s, path in written if s >= begun_s - CLOCKS_DIFFER_S), default=(0.0, None))[1]


def add_traces(
    observation: Observation, ranks: AbstractRanks, plan: HostPlan, *, num_hosts: int, begun_s: float
) -> Observation:
    """Add the operators of the traces that a trial has left to its observation, or a note if it left none.

    Nothing runs on the ranks any more. The trial began `begun_s` after the epoch [s].
    """
    try:
        found = list(_find_traces(ranks, plan, num_hosts, begun_s))
    except RanksLostError as error:  # the trial itself is over
        found = [FoundTrace(trouble=str(error))]
    samples = _merge(sample for each in found if each.found is not None for sample in each.found.samples)
    notes = [note for each in found if (note := _note(each))]
    if not any(each.name or each.trouble for each in found):
        values = dict(plan.values)
        where = fill_text(plan.profile or "", values | {"host_rank": "0"})
        notes.append(
            f"no trace at {where}: let the program write one in the {values['warmup_steps']} steps of its warm-up"
        )
    reason = "; ".join(filter(None, (observation.reason, *notes)))
    return replace(observation, operator_samples=samples, reason=reason)


def _find_traces(ranks: AbstractRanks, plan: HostPlan, num_hosts: int, begun_s: float) -> Iterable[FoundTrace]:
    ranks.launch("trials.command.trace_program:read_host", plan, begun_s, num_ranks=num_hosts)
    deadline_s = time.monotonic() + READ_LIMIT_S
    try:
        while ranks.running and time.monotonic() < deadline_s:
            for event in ranks.events(1.0):
                if isinstance(event, Told):
                    assert isinstance(event.value, FoundTrace), event
                    yield event.value
                elif event.code:
                    yield FoundTrace(trouble="the process that reads it has died, perhaps for want of memory")
        if ranks.running:
            yield FoundTrace(trouble=f"is not read within {READ_LIMIT_S:g} s")
    finally:
        ranks.kill()


def _note(each: FoundTrace) -> str:
    """Return the note on a host's trace; empty if there is none."""
    if each.trouble:
        return f"trace {each.name}: {each.trouble}" if each.name else f"trace: {each.trouble}"
    if each.found is None:
        return ""
    if not each.found.samples:
        return f"trace {each.name}: no operator in it can be mapped; record shapes with it"
    left_out = f", {each.found.num_left_out} calls left out" if each.found.num_left_out else ""
    return f"trace {each.name}: {len(each.found.samples)} operators, {each.found.share:.0%} of its time{left_out}"


def _merge(samples: Iterable[OperatorSample]) -> tuple[OperatorSample, ...]:
    found: dict[object, list[OperatorSample]] = defaultdict(list)
    for sample in samples:
        found[sample.kind, sample.phase, sample.shape].append(sample)
    return tuple(merge_samples(each, by_shape=True) for each in found.values())
