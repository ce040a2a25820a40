"""Compare our memory terms, collectives and rules with what training frameworks say when they are rehearsed.

    python -m benchmarks.judges.models_against_rehearsals [--framework megatron-core] [--layouts tp=2] [--json]

Each layout runs without a device as the first rank of each of its stages (benchmarks/support/rehearsed_layouts.py); the
framework must be installed (`make frameworks`). A row is a stage. Its columns are predicted over rehearsed: bytes of
weights, gradients and optimizer states, of all else that is alive at the peak (`rest`), and of the whole peak. Then
follow the bytes and messages of all its collectives; those of which one side knows nothing are named below the table,
if they carry more than SMALL bytes a step.

The exit status is 1 if parameters differ by more than padded rows, if a ratio is further from 1 than its bound, or if
the framework refuses what our rules allow, or runs what they forbid: a new release changed something, or a model here
is wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.rehearsed_layouts import FRAMEWORKS, Framework, RehearsedLayout, rehearsed
from benchmarks.support.timing import USERS_MISTAKE, benchmark_parser, publish, tell
from costmodels.blocks.operator import OpKind
from costmodels.step.memory.peak import NOT_COUNTED
from costmodels.step.stage_figures import StageCollective, StageFigures, stage_figures
from hardware.io.errors import ConfigError
from tuner.rehearsal.answer import Collective, RankAnswer

BOUNDS = {
    "weights": 0.01,
    "gradients": 0.01,
    "optimizer": 0.01,
    "rest": 0.30,
    "peak": 0.10,
    "bytes": 0.05,
    "messages": 0.25,
}
"""Largest distance from 1 of each ratio, in a stage."""
SMALL = 1 << 24
"""Bytes of a kind of collective in a group and step below which it is not compared: losses, gradients of norms."""
PADDING = 0.01
"""Share of the parameters that may differ: rows that Megatron-LM pads its tables by, which our counts leave out."""
LEAST = 1 << 16
"""Bytes of a message below which it is not counted: norms, and the counts and probabilities of routed tokens, which our
models leave out."""
FEW = 2
"""Difference of messages that is none: of a few buckets one may be fuller."""
_KINDS = (
    (("allgather", "all_gather"), OpKind.ALL_GATHER),
    (("reduce_scatter",), OpKind.REDUCE_SCATTER),
    (("allreduce", "all_reduce"), OpKind.ALL_REDUCE),
    (("alltoall", "all_to_all"), OpKind.ALL_TO_ALL),
    (("send",), OpKind.SEND_RECV),
)
"""Kinds of collectives by words in the names of PyTorch's operators."""

Sent = tuple[OpKind, tuple[int, ...]]
"""Kind of a collective, and the ranks of its group; of messages, no ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Comparison of one stage of one layout.

    Attributes:
        layout: Layout in words.
        stage: Number of the stage.
        verdict: What the framework said.
        ratios: Predicted over rehearsed by the keys of BOUNDS; empty if it did not run.
        unlike: Sentences about what differs beyond its bound.
    """

    layout: str
    stage: int
    verdict: str
    ratios: dict[str, float]
    unlike: tuple[str, ...]

    def shown(self) -> dict[str, Any]:
        """Return the cells of the table."""
        ratios = {name: self.ratios.get(name, "") for name in BOUNDS}
        return {"layout": self.layout, "stage": self.stage, "verdict": self.verdict, **ratios}

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        shown = {"layout": self.layout, "stage": self.stage, "verdict": self.verdict}
        return shown | self.ratios | {"unlike": list(self.unlike)}


def kind_of(name: str) -> OpKind | None:
    """Return the kind of one of PyTorch's operators; None for receptions and others."""
    return next((kind for words, kind in _KINDS if any(word in name for word in words)), None)


def sent_by(collectives: Sequence[Collective]) -> tuple[Counter[Sent], Counter[Sent]]:
    """Return bytes and messages of what a rank was seen to send, groups of one rank left out."""
    sizes, messages = Counter[Sent](), Counter[Sent]()
    for one in collectives:
        kind = kind_of(one.name)
        if kind is not None and len(one.ranks) > 1 and one.size_bytes >= LEAST:
            key = kind, () if kind is OpKind.SEND_RECV else one.ranks
            sizes[key] += one.size_bytes * one.count
            messages[key] += one.count
    return sizes, messages


def predicted_by(collectives: Sequence[StageCollective]) -> tuple[Counter[Sent], Counter[Sent]]:
    """Return bytes and messages of what a rank is predicted to send."""
    sizes, messages = Counter[Sent](), Counter[Sent]()
    for one in collectives:
        if one.size_bytes >= LEAST:
            key = one.kind, () if one.kind is OpKind.SEND_RECV else one.ranks
            sizes[key] += one.size_bytes * one.count
            messages[key] += one.count
    return sizes, messages


def compare(found: RehearsedLayout) -> list[Row]:
    """Return the rows of a layout."""
    rules = "; ".join(f"{rule}: {why}" for rule, why in found.broken.items())
    figures = None if found.broken else stage_figures(found.setting, found.config)
    rows = []
    for seen in found.answers:
        ratios, unlike = ({}, []) if figures is None or seen.peak_bytes is None else _compare_stage(figures, seen)
        if (seen.verdict == "refused") != bool(found.broken):
            ours = f"our rules forbid it ({rules})" if rules else "our rules allow it"
            unlike.append(f"{seen.verdict} ({seen.error})" if not rules else f"{seen.verdict}, but {ours}")
        elif seen.verdict == "unknown":
            unlike.append(f"unknown ({seen.error})")
        rows.append(
            Row(
                layout=" ".join((found.layout.model, found.layout.text)),
                stage=seen.stage,
                verdict=seen.verdict,
                ratios=ratios,
                unlike=tuple(unlike),
            )
        )
    return rows


def _compare_stage(figures: StageFigures, seen: RankAnswer) -> tuple[dict[str, float], list[str]]:
    stage, parts = seen.stage, figures.memory.parts_bytes
    rehearsed_bytes = {part: seen.parts.get(part, 0) for part in ("weights", "gradients", "optimizer")}
    predicted = {part: float(parts[part][stage]) for part in rehearsed_bytes}
    whole = sum(float(sizes[stage]) for part, sizes in parts.items() if part not in NOT_COUNTED["allocated"])
    peak = seen.peak_bytes or 0
    rehearsed_bytes |= {"rest": peak - sum(rehearsed_bytes.values()), "peak": peak}
    predicted |= {"rest": whole - sum(predicted.values()), "peak": whole}
    ratios = {part: predicted[part] / max(rehearsed_bytes[part], 1) for part in predicted}
    unlike = []
    if abs(float(figures.parameters[stage]) / max(seen.parameters or 0, 1) - 1) > PADDING:
        unlike.append(f"parameters: {figures.parameters[stage]:,.0f} predicted, {seen.parameters:,} rehearsed")
    told, counted = _compare_collectives(figures.collectives[stage], seen.collectives)
    ratios |= counted
    unlike += [f"{name}: {ratio:.3f}" for name, ratio in ratios.items() if abs(ratio - 1) > BOUNDS[name]]
    return ratios, unlike + told


def _compare_collectives(
    predicted: Sequence[StageCollective], seen: Sequence[Collective]
) -> tuple[list[str], dict[str, float]]:
    """Return sentences about collectives of one side alone, and the ratios that are furthest from 1."""
    (own_bytes, own_messages), (seen_bytes, seen_messages) = predicted_by(predicted), sent_by(seen)
    told, ratios = [], {"bytes": [1.0], "messages": [1.0]}
    for key in own_bytes.keys() | seen_bytes.keys():
        mine, theirs = own_bytes[key], seen_bytes[key]
        if max(mine, theirs) < SMALL:
            continue
        if not mine or not theirs:
            side = "predicted" if mine else "rehearsed"
            told.append(f"{key[0]} of {len(key[1]) or 2} ranks, {max(mine, theirs):,} bytes: {side} alone")
            continue
        ratios["bytes"].append(mine / theirs)
        if abs(own_messages[key] - seen_messages[key]) > FEW:
            ratios["messages"].append(own_messages[key] / seen_messages[key])
    return told, {name: max(values, key=lambda ratio: abs(ratio - 1)) for name, values in ratios.items()}


def judge(framework: Framework, chosen: str) -> list[Row]:
    """Rehearse the layouts whose words contain `chosen`, and return the rows.

    Raises:
        ConfigError: no layout is chosen.
    """
    layouts = [layout for layout in framework.layouts if chosen in layout.text]
    if not layouts:
        raise ConfigError("is in no layout", key="--layouts", value=chosen)
    rows = []
    for found in rehearsed(framework, layouts):
        rows += compare(found)
        tell(f"{found.layout.model} {found.layout.text}: {', '.join(one.verdict for one in found.answers)}")
    return rows


def worst(rows: Sequence[Row]) -> dict[str, float]:
    """Return of every ratio the one that is furthest from 1."""
    return {
        name: max((row.ratios[name] for row in rows if row.ratios), key=lambda ratio: abs(ratio - 1), default=1.0)
        for name in BOUNDS
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or a JSON object; return the exit status."""
    parser = benchmark_parser("judges.models_against_rehearsals", __doc__)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="megatron-core")
    parser.add_argument("--layouts", default="", metavar="TEXT", help="rehearse layouts that contain this text (all)")
    given = parser.parse_args(arguments)
    framework = FRAMEWORKS[given.framework]
    if missing := framework.missing():
        tell(f"{missing} is not installed: `make frameworks` installs it")
        return USERS_MISTAKE
    try:
        rows = judge(framework, given.layouts)
    except ConfigError as error:
        tell(f"models_against_rehearsals: {error}")
        return USERS_MISTAKE
    unlike = [f"{row.layout}, stage {row.stage}: {text}" for row in rows for text in row.unlike]
    if given.json:
        print(json.dumps({"rows": [row.as_json() for row in rows], "worst": worst(rows), "bounds": BOUNDS}, indent=2))
    else:
        last = {"worst": worst(rows), "bound": BOUNDS}
        ends = [{"layout": name, "stage": "", "verdict": "", **own} for name, own in last.items()]
        publish([*(row.shown() for row in rows), *ends], as_json=False)
        print(*unlike, sep="\n")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
