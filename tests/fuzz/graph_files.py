"""Targets: graphs, as the contest's assignment problems have them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.assignment.contest_file import read_problem
from tests.fuzz.mutation import of_bytes, of_json
from tests.fuzz.target import Target

PROBLEM = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[40, 70], [30, 50], [0, 110], [90, 110]],
            "costs": [[15, 55, 65], [45, 85], [0, 2.5, 3], [7]],
            "usages": [[10, 25, 40], [55, 15], [1, 2, 3], [0]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[30, 70, 0, 1, 2, 3], [0, 0, 1e9, 5, 5, 5]]},
        "usage_limit": 50,
    }
}


def _read(data: bytes, folder: Path) -> None:
    path = folder / "problem.json"
    path.write_bytes(data)
    read_problem(path)


TARGETS = (
    Target(name="graph", read=_read, mutation=of_json, seeds=lambda: (json.dumps(PROBLEM).encode(),)),
    Target(
        name="packed graph",
        read=_read,
        mutation=of_bytes,
        seeds=lambda: (gzip.compress(json.dumps(PROBLEM).encode(), mtime=0),),
    ),
)
