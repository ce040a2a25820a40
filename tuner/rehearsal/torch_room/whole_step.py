"""Counts of a whole step, from two steps of which each made some of its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

Kind = TypeVar("Kind", bound=Hashable)


def whole_counts(few: Counter[Kind], many: Counter[Kind], made: tuple[int, int], whole: int) -> Counter[Kind]:
    """Return how often each kind occurs in a step of all micro-batches.

    Every micro-batch does the same, whatever their number: what a step does more often by a whole multiple of the
    further micro-batches, it does as much more often in a whole step. What does not follow that rule, such as a sum
    over the losses of all micro-batches, whose shape says their number, occurs as often as in the longer step.

    Args:
        few: Counts of the shorter step.
        many: Counts of the longer step.
        made: Micro-batches of the shorter and of the longer step; they differ by two or more, so that what occurs once
            in the longer step alone is no multiple.
        whole: Micro-batches of the whole step.
    """
    further = made[1] - made[0]
    found: Counter[Kind] = Counter()
    for kind, count in many.items():
        each, rest = divmod(count - few[kind], further)
        found[kind] = count if rest or each < 0 else count + each * (whole - made[1])
    return found


def whole_bytes(few: int, many: int, made: tuple[int, int], whole: int) -> int:
    """Return by how many bytes a whole step holds more than the longer step, at the same place of both.

    Beyond the micro-batches that fill a pipeline, each leaves the same behind: its losses. It is 0 where the bytes do
    not follow that rule.

    Args:
        few: Bytes alive after the backward passes of the shorter step.
        many: Those of the longer step.
        made: Micro-batches of the shorter and of the longer step.
        whole: Micro-batches of the whole step.
    """
    each, rest = divmod(many - few, made[1] - made[0])
    return 0 if rest or each < 0 else each * (whole - made[1])
