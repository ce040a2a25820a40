import numpy as np
import pytest

from tuner.planners.engine.mixed_integer import MixedInteger
from tuner.planners.engine.outcome import Known, Limits, Stop


def knapsacks(limits, *, sizes=60, least=0.0):
    """Solve twenty knapsacks that share their things, of which at least a value has to be taken."""
    draw = np.random.default_rng(0)
    program = MixedInteger()
    taken = program.variables((sizes,), upper=1.0, integer=True)
    for row in draw.integers(1, 50, (20, sizes)):
        program.add(zip(taken, row.astype(float), strict=True), at_most=float(row.sum() // 3))
    worth = -draw.integers(1, 60, sizes).astype(float)
    program.cost(zip(taken, worth, strict=True))
    program.add(zip(taken, -worth, strict=True), at_least=least)
    return program.solve(limits, lambda values: (float(worth @ values.round()), values.round()))


@pytest.mark.parametrize("nodes", [1, 3, 20])
def test_a_limit_of_nodes_ends_a_search_with_what_it_has(nodes):
    """HiGHS's limit of nodes is a limit as that of time is, and the bound still holds for every solution."""
    ended = knapsacks(Limits(nodes=nodes))
    whole = knapsacks(Limits(gap=0.01))

    assert (ended.known, ended.stop) == (Known.FEASIBLE, Stop.NODES)
    assert ended.bound <= whole.best.cost
    assert whole.bound <= ended.best.cost
    assert whole.stop is Stop.GAP


def test_what_cannot_be_is_told_from_what_was_not_found():
    """More than all things are worth cannot be taken, however few nodes there are."""
    assert knapsacks(Limits(nodes=1), least=1e6).known is Known.INFEASIBLE
