"""Report of the named dimension analysis: colours, conflicts, compatibility sets, and a drawing of the graph.

The drawing is text for Graphviz, in the style of figure 5d of TOAST: an arrow for each entry of the map M, and a red
line for each conflict. Of each group of repeated sets it shows the first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tuner.planners.toast.colour_actions import group_name
from tuner.planners.toast.compatibility import Compatibility
from tuner.planners.toast.named_dims import WHOLE

MOST_LINES = 30
"""Most groups of colours that are listed, the largest first."""


def report_json(found: Compatibility) -> dict[str, Any]:
    """Return the analysis as data."""
    names = found.names
    return {
        "names": len(names.ops),
        "colours": names.num_colours,
        "conflicts": len(names.conflicts),
        "compatibility_sets": len(found.sets),
        "resolutions": found.num_resolutions,
        "groups": [_group(found, group) for group in _by_names(found)],
    }


def report_lines(found: Compatibility) -> list[str]:
    """Return the analysis as lines of text."""
    names = found.names
    lines = [
        f"{len(names.ops):,} dims have {names.num_colours} colours in {found.num_groups} groups; "
        f"{len(names.conflicts)} conflicts form {len(found.sets)} compatibility sets, "
        f"and there are {found.num_resolutions} ways to resolve them"
    ]
    groups = _by_names(found)
    rows = [_group(found, group) for group in groups[:MOST_LINES]]
    width = max((len(row["dim"]) for row in rows), default=0)
    for row in rows:
        conflicts = f", {row['conflicts']} conflicts in {row['sets']} sets" if row["conflicts"] else ""
        times = f" in {row['colours']} colours" if row["colours"] > 1 else ""
        lines.append(f"  {row['dim']:<{width}}  {row['size']:>7} wide, {row['names']:,} dims{times}{conflicts}")
    if len(groups) > MOST_LINES:
        lines.append(f"  and {len(groups) - MOST_LINES} smaller ones")
    return lines


def drawing(found: Compatibility) -> str:
    """Draw the part of the dimension graph that is in conflict, as text for Graphviz."""
    names = found.names
    shown: set[int] = set()
    groups: set[int] = set()
    pairs = []
    for each in found.sets:
        if each.group not in groups:
            groups.add(each.group)
            # Repeated layers would draw the same picture again.
            pairs += [(each.group, *sides) for sides in each.sides]
            shown |= {name for sides in each.sides for name in sides}
    lines = ["digraph dims {", "  node [shape=box, fontsize=10];"]
    for name in sorted(shown):
        op = names.graph.ops[int(names.ops[name])]
        factor = int(names.factors[name])
        label = f"{op.name}\\n{op.rule.factors[factor].name or f'factor {factor}'}"
        lines.append(f'  {name} [label="{label}"];')
    # Several tensors may connect the same two names; one arrow is enough.
    entries = dict.fromkeys(zip(names.sources.tolist(), names.targets.tolist(), strict=True))
    lines += [f"  {source} -> {target};" for source, target in entries if source in shown and target in shown]
    lines += [
        f'  {one} -> {other} [dir=none, color=red, constraint=false, label="{group}"];' for group, one, other in pairs
    ]
    return "\n".join([*lines, "}", ""])


def _by_names(found: Compatibility) -> list[int]:
    """Sort the groups of colours, those with most names first."""
    counts = _counts(found)
    return sorted(range(found.num_groups), key=lambda group: (-counts[group], group))


def _counts(found: Compatibility) -> list[int]:
    names = found.names
    own = (names.followed < 0) & (names.factors != WHOLE)
    counts: list[int] = np.bincount(
        found.colour_groups[names.colours[own]], minlength=max(found.num_groups, 1)
    ).tolist()
    return counts


def _group(found: Compatibility, group: int) -> dict[str, Any]:
    names = found.names
    colours = found.colours_of(group)
    members = set(colours.tolist())
    name = int(names.names_of(int(colours[0]))[0])
    op = names.graph.ops[int(names.ops[name])]
    sets = [each for each in found.sets if each.colour in members]
    return {
        "dim": group_name(found, group),
        "size": op.rule.factors[int(names.factors[name])].size,
        "colours": len(members),
        "names": _counts(found)[group],
        "conflicts": sum(len(each.sides) for each in sets),
        "sets": len(sets),
        "resolutions": 2 ** len({each.group for each in sets}),
    }
