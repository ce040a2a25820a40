"""State of a study's cluster at one time of a trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from hardware.cluster import Cluster
from hardware.dynamics import Trace, cluster_at, lost_hosts
from hardware.io.errors import ConfigError
from hardware.trace_file import read_trace
from tuner.study_file.request import StudyRequest


def trace_of(request: StudyRequest, file: Path | None, *, option: str, value: str | None = None) -> Trace:
    """Read the trace of a file, or return the study's own trace.

    Args:
        request: Study whose cluster the trace changes.
        file: File of the trace; None for the study's own.
        option: Command-line option that needs the trace, for the message.
        value: Value of that option, for the message.

    Raises:
        ConfigError: No trace is given, or it cannot be read.
    """
    if file is not None:
        return read_trace(file, request.problem.cluster)
    if request.trace is None:
        raise ConfigError(
            "needs a trace, and the study's cluster has none",
            file=request.file,
            key=option,
            value=value,
            nearest="name a CSV file as cluster.trace, or on the command line",
        )
    return request.trace


def study_at(request: StudyRequest, trace: Trace, time_s: float) -> StudyRequest:
    """Return the study with its cluster in the state at `time_s`."""
    subject = request.problem.subject.on_cluster(cluster_at(request.problem.cluster, trace, time_s))
    return replace(request, problem=replace(request.problem, subject=subject))


def name_hosts(hosts: Collection[int]) -> str:
    """Format hosts by their names in a trace."""
    return ", ".join(f"h{host}" for host in sorted(hosts))


def missing_in_words(cluster: Cluster, trace: Trace, time_s: float) -> str:
    """Describe the hosts that the cluster lacks at a time; empty if none is lost."""
    lost = lost_hosts(trace, time_s)
    if not lost:
        return ""
    left = cluster_at(cluster, trace, time_s).num_devices
    verb = "is" if len(lost) == 1 else "are"
    return f"at {time_s:g} s {name_hosts(lost)} {verb} lost, and {left} of {cluster.num_devices} devices are left"
