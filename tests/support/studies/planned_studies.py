"""Small study with planned layers: three shapes and a few candidates."""

from __future__ import annotations

from tests.support.studies.broken_studies import study

SPACE = "{pp: [1], tp: [1, 2], cp: [1], up: [1, 2], mbs: [1]}"
NUM_SHAPES = 3
"""tp=2, up=2, and both; where both are 1 a device has its layers to itself."""


def planned_study_text(planner: str | None = "{name: descent}", **changes: str) -> str:
    """Return the text of the study, with the `planner:` key unless it is None."""
    keys = {
        "name": "planned",
        "cluster": "{name: dgx-h100, hosts: 2}",
        "job": "{sequence_length: 4096, global_batch_size: 64}",
        "space": SPACE,
        "search": "{max_trials: 3, confidence: 1.0, draws: 10}",
        "planner": planner,
    }
    return study(**keys | changes)
