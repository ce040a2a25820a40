"""Processes that Ray starts for clusters, and that a Ray of one program leaves out.

Ray starts four Python processes beside its own core for everybody: an autoscaler's monitor, a server of its dashboard
and of jobs, a reader that sends the logs of workers to drivers, and an agent that exports metrics. A study asks none of
them for anything. Each imports Ray and more, all at once, which is most of the time that Ray takes to start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_STARTS = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's node, each of which starts one of the processes."""


@contextlib.contextmanager
def without_helpers(ray: Any) -> Iterator[None]:
    """Let a Ray that starts within the block leave them out.

    `ray.init` has no option for it, though Ray's own node has. A version of Ray that names these functions otherwise
    starts all its processes. The agent stays, since Ray's core waits for it, but without what `ray[default]` adds.
    """
    node, utils = ray._private.node.Node, ray._private.utils
    changes: list[tuple[Any, str, Callable[..., object]]] = [
        *((node, name, _start_nothing) for name in _STARTS),
        (utils, "get_dashboard_dependency_error", _has_no_dashboard),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, replacement in changes:
            if hasattr(place, name):
                stack.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, replacement)
        yield


def kill_when_ended(ray: Any) -> None:
    """Let the Ray of this process kill its processes when it ends, instead of asking each and waiting a second for it.

    They do not hear the signal by which it asks (`unheard_signals.py`).
    """
    node = ray._private.worker._global_node
    if node is not None:
        end = node.kill_all_processes
        node.kill_all_processes = lambda **options: end(**{**options, "allow_graceful": False})


def _start_nothing(*_: object, **__: object) -> None:
    """Start no process, as Ray's node does when it is told to."""


def _has_no_dashboard(*_: object) -> ImportError:
    """Answer as a Ray without the extra `default`."""
    return ImportError("left out: nobody looks at the dashboard of one program's Ray")
