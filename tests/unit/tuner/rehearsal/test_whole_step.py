"""Counts of a whole step, from two steps that make some of its micro-batches."""

from __future__ import annotations

from collections import Counter

import pytest

from tuner.rehearsal.torch_room.whole_step import whole_bytes, whole_counts


def step(micro_batches):
    """A step: seven products a micro-batch and two more, one update, and a sum whose shape is their number."""
    return Counter({"product": 7 * micro_batches + 2, "update": 1, f"sum of {micro_batches}": 1})


@pytest.mark.parametrize("made", [(1, 3), (1, 5), (2, 4), (4, 8)])
def test_counts_are_those_of_the_step_that_makes_all(made):
    """Of 16 micro-batches, for any two numbers that were made; the sum keeps the shape of the longer step."""
    few, many = map(step, made)

    found = whole_counts(few, many, made, 16)

    assert found == Counter({"product": 7 * 16 + 2, "update": 1, f"sum of {made[1]}": 1})
    assert found.total() == step(16).total()


def test_what_only_the_first_step_did_is_left_out():
    """The shorter step may have done something once that the longer one did not."""
    found = whole_counts(step(1) + Counter({"once": 3}), step(3), (1, 3), 9)

    assert found["once"] == 0


@pytest.mark.parametrize(
    ("few", "many", "further"), [(1000, 1000, 0), (1000, 2024, 512 * 5), (1000, 1511, 0), (9, 5, 0)]
)
def test_bytes_grow_by_equal_parts_or_not_at_all(few, many, further):
    """Two further micro-batches left 1,024 bytes: five more leave 2,560; other changes are no losses."""
    assert whole_bytes(few, many, (1, 3), 8) == further
