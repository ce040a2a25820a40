"""Search the five ready placements, and compare each with the usual placements beside it.

    python -m benchmarks.judges.placements [--time_limit 60] [--names ppo-7b-16 ...] [--overlap] [--json]

For each file in configs/placements: the predicted step, the lower bound of the family and the gap, the time until the
gap was 5%, the baselines (all modules on all devices in turn, and fixed halves), and for small ones HiGHS.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support.timing import benchmark_parser, count_at_least, publish, tell
from tuner.place.answer import check_answer, place
from tuner.place.placement_file import read_placement

PLACEMENTS = Path(__file__).resolve().parents[2] / "configs" / "placements"
NAMES = ("ppo-7b-16", "grpo-32b-64", "ppo-70b-256", "vlm-7b-32", "vlm-76b-128")
ACCEPTED_GAP = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Search each placement, and print a row for it."""
    parser = benchmark_parser("judges.placements", __doc__)
    parser.add_argument("--time_limit", type=count_at_least(1), default=60, help="time of each search [s]")
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES, help="placements")
    parser.add_argument("--overlap", action="store_true", help="generate for the next step beside the training")
    given = parser.parse_args(argv)
    rows = []
    for name in given.names:
        tell(f"searching {name}")
        rows.append(_row(name, given.time_limit, overlap=given.overlap))
    publish(rows, as_json=given.json)
    return 0


def _row(name: str, time_s: float, *, overlap: bool) -> dict[str, Any]:
    """Return the figures of one placement."""
    workload = read_placement(PLACEMENTS / f"{name}.yaml")
    found = place(replace(workload, overlap_steps=int(overlap)), time_s=time_s, gap=0.0)
    check_answer(found)
    baselines = {one.name: one.step_time_s for one in found.baselines}
    return {
        "placement": name,
        "step_s": found.step_time_s,
        "bound_s": found.outcome.bound,
        "gap": found.outcome.gap,
        "s_to_5%": found.seconds_to_gap(ACCEPTED_GAP),
        **{baseline: baselines.get(baseline) for baseline in ("colocated", "halves", "highs")},
        "nodes": found.outcome.nodes,
        "search_s": found.search_s,
    }


if __name__ == "__main__":
    sys.exit(main())
