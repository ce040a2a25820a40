"""Compare what ranks of planned torch modules send with what their plans count, by kind and group.

    python -m benchmarks.judges.torch_traffic [--programs NAME ...] [--planner NAME] [--json]

First every change of an 8 x 8 matrix's layout on meshes of 4 and of 2 x 2 gloo ranks, by the parts of planned modules
and by DTensor's `redistribute`. `as planned` counts the changes whose bytes are those of the plan's list, on each rank
and group, and `most` is the largest ratio of the bytes that a rank sends in rings to the plan's, where the plan has
any. Then one step of each program on 2 x 2 ranks: small modules of `benchmarks/zoo`, and models of transformers where
it is installed; `sent` is the ratio of all bytes, and `unsaid` counts the changes that the plan names as more
expensive.

torch must be installed. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.timing import answer, benchmark_parser, publish, tell
from costmodels.blocks.operator import OpKind

MESHES = ((4,), (2, 2))
AXES = {"data": 2, "model": 2}
LIMIT_S = 600.0

Traffic = Mapping[tuple[OpKind, tuple[int, ...]], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("judges.torch_traffic", __doc__)
    parser.add_argument("--programs", nargs="*", help="programs (all)")
    parser.add_argument("--planner", default="recursive", help="planner (recursive, which cuts small programs too)")
    return answer("torch_traffic", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows."""
    from benchmarks.support.changed_layouts import change_all, programs, train_all  # noqa: PLC0415 # torch starts
    from trials.ranks.processes import RankProcesses  # noqa: PLC0415
    from trials.torch_training.rank_setup import TORCH_RANKS  # noqa: PLC0415

    names = programs() if given.programs is None else tuple(given.programs)
    with RankProcesses(TORCH_RANKS) as ranks:
        changed = [(sizes, _told(ranks, change_all, sizes)) for sizes in MESHES]
        trained = []
        for name in names:
            trained.append(_told(ranks, train_all, AXES, (name,), given.planner))
            tell(name)
    return {
        "settings": {"programs": names, "planner": given.planner},
        "changes": [_row_of_changes(sizes, told) for sizes, told in changed],
        "programs": [_row_of_program(told) for told in trained if all(told)],
    }


def show(told: Mapping[str, Any]) -> None:
    """Print the tables."""
    publish(told["changes"], as_json=False)
    print()
    publish(told["programs"], as_json=False)


def _told(ranks: Any, function: Any, *arguments: Any) -> list[list[Any]]:
    """Return what each rank tells.

    Raises:
        RuntimeError: A rank fails.
    """
    from trials.ranks.messages import Exit, Told  # noqa: PLC0415

    ranks.launch(f"{function.__module__}:{function.__qualname__}", *arguments, num_ranks=4)
    told: list[list[Any]] = [[] for _ in range(4)]
    while ranks.running:
        events = ranks.events(LIMIT_S)
        if not events or any(isinstance(event, Exit) and event.code for event in events):
            ranks.kill()
            raise RuntimeError(f"{function.__qualname__}{arguments} fails:\n{ranks.printed()[-4000:]}")
        for event in events:
            if isinstance(event, Told):
                told[event.rank].append(event.value)
    return told


def _row_of_changes(sizes: tuple[int, ...], told: list[list[Any]]) -> dict[str, Any]:
    """Return how many changes send what is planned, and the largest ratio, by both ways to move parts."""
    row: dict[str, Any] = {"mesh": "x".join(map(str, sizes)), "changes": len(told[0])}
    for at, name in enumerate(("own", "dtensor")):
        ratios, alike = [], 0
        for ranks in zip(*told, strict=True):  # one change on all ranks
            planned, sent = ([rank[which] for rank in ranks] for which in (2, 3 + at))
            alike += planned == sent
            if most := max(map(_ring_bytes, planned)):
                ratios.append(max(map(_ring_bytes, sent)) / most)
        row |= {f"{name} as planned": alike, f"{name} most": max(ratios)}
    return row


def _row_of_program(told: list[list[Any]]) -> dict[str, Any]:
    """Return what a step sends over what is planned."""
    ((name, _, _, unsaid),) = told[0]
    pairs = [(sent, planned) for ((_, sent, planned, _),) in told]
    sent_bytes, planned_bytes = (sum(_ring_bytes(pair[which]) for pair in pairs) for which in (0, 1))
    channels = {channel for sent, planned in pairs for channel in (*sent, *planned)}
    apart = [
        channel
        for channel in channels
        if any(sent.get(channel, 0) != planned.get(channel, 0) for sent, planned in pairs)
    ]
    return {
        "program": name,
        "planned_bytes": planned_bytes / len(pairs),
        "sent": sent_bytes / planned_bytes if planned_bytes else 1.0,
        "apart": len(apart),
        "unsaid": unsaid,
    }


def _ring_bytes(traffic: Traffic) -> float:
    """Return what a rank sends if collectives run in rings."""
    found = 0.0
    for (kind, ranks), num_bytes in traffic.items():
        found += num_bytes * (1 - 1 / len(ranks)) * (2 if kind == OpKind.ALL_REDUCE else 1)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
