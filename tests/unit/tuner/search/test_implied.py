"""Candidates that cannot fit where others did not, on a grid that all orders of memory open."""

import itertools

import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from tuner.search.implied import ImpliedFailures


@pytest.fixture(scope="module")
def configs():
    """Two layouts of 8 devices with three micro-batches, two recomputations, two ZeRO stages and an offload."""
    return [
        ParallelConfig(pp=1, tp=tp, dp=8 // tp, mbs=mbs, recompute=recompute, zero_stage=stage, offload=offload)
        for tp, mbs, recompute, stage, offload in itertools.product(
            (2, 4), (1, 2, 4), ("none", "full"), (0, 1), ("none", "optimizer")
        )
    ]


@pytest.fixture(scope="module")
def failures(configs):
    """Failures among them."""
    return ImpliedFailures(ConfigGrid.from_configs(configs, ("recompute", "zero_stage", "offload")))


def needs_more(one, other):
    """Whether the other is the same layout and needs no less by any account."""
    return (
        (one.pp, one.tp, one.dp) == (other.pp, other.tp, other.dp)
        and other.mbs >= one.mbs
        and (one.recompute == "full" or other.recompute == "none")
        and other.zero_stage <= one.zero_stage
        and (one.offload == "optimizer" or other.offload == "none")
    )


def test_they_are_those_that_need_more_by_every_account(configs, failures):
    """Of every candidate, the failure implies those of its layout with as large a micro-batch, as little recomputation
    and as little spreading of states, and no others.
    """
    for at, config in enumerate(configs):
        expected = {other for other, each in enumerate(configs) if other != at and needs_more(config, each)}
        assert failures.by({at}, ()) == expected
    assert len(failures.by(set(range(len(configs))), ())) == 0


def test_a_failure_that_another_contradicts_implies_nothing(configs, failures):
    """Where a candidate that needs more ran, memory was not the cause; other failures still count."""
    first, second = (
        at
        for at, each in enumerate(configs)
        if (each.mbs, each.recompute, each.zero_stage) == (1, "full", 1) and each.offload == "none"
    )
    implied = [failures.by({at}, ()) for at in (first, second)]

    found = failures.by({first, second}, {max(implied[0])})

    assert found == implied[1]
    assert not implied[0] & implied[1]


def test_it_needs_no_further_dimensions():
    """In a grid of degrees alone, micro-batches are the account."""
    grid = ConfigGrid.from_configs([ParallelConfig(pp=1, tp=1, dp=4, mbs=mbs) for mbs in (4, 1, 2)])

    assert ImpliedFailures(grid).by({2}, ()) == {0}
    assert np.array_equal(grid.mbs, [4, 1, 2])
