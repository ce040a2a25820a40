"""Rows that the traces of all placements begin with, in the Trace Event Format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def process_rows(hosts: Sequence[int], further: str) -> list[dict[str, Any]]:
    """Name a process for each host, and a further one that has the number behind the largest host's.

    Source: Google, Trace Event Format, metadata events ("ph": "M").

    Args:
        hosts: Host of each device or part of one; a host may stand here several times.
        further: Name of the further process.
    """
    rows: list[dict[str, Any]] = []
    for host in dict.fromkeys(hosts):
        rows.append({"ph": "M", "name": "process_name", "pid": host, "args": {"name": f"host {host}"}})
        rows.append({"ph": "M", "name": "process_sort_index", "pid": host, "args": {"sort_index": host}})
    rows.append({"ph": "M", "name": "process_name", "pid": max(hosts) + 1, "args": {"name": further}})
    return rows
