from collections import Counter

import numpy as np
import pytest

from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall
from tests.support.settings.small_spaces import setting_of
from tuner.calibrate.calibration_plan import MOST_CALLS, Wanted, calibration_plan, calls_of
from tuner.space.enumeration import enumerate_space


@pytest.fixture(scope="module")
def calls():
    """The calls of all candidates of a small setting on one host."""
    setting, options = setting_of("megatron", batch=16)
    grid, _ = enumerate_space(setting, options)
    return calls_of(setting, grid, most_ranks=8)


def product(m, share, predicted_s=1e-3):
    """A wanted product of m rows."""
    call = IsolatedCall(
        kind=OpKind.MATMUL, phase=Phase.FORWARD, role="forward", precision="bf16", shape=(float(m), 512.0, 512.0)
    )
    return Wanted(call=call, share=share, predicted_s=predicted_s)


def test_the_calls_make_up_the_steps(calls):
    """Operators and collectives on one host are most of the candidates' predicted steps, and each is there once."""
    told = sum(one.share for one in calls.wanted)

    # the rest is that of the host
    assert 0.7 < told < 1
    assert told + calls.left_out < 1.01
    assert len({one.call for one in calls.wanted}) == len(calls.wanted)
    assert {one.call.kind for one in calls.wanted} >= {OpKind.MATMUL, OpKind.ATTENTION, OpKind.NORM, OpKind.ALL_GATHER}


def test_large_groups_are_left_out(calls):
    """Groups of more ranks than there are here are counted as left out, with their share."""
    setting, options = setting_of("megatron", batch=16)
    grid, _ = enumerate_space(setting, options)

    fewer = calls_of(setting, grid, most_ranks=2)

    assert max(one.call.group_size for one in fewer.wanted) == 2
    assert fewer.left_out > calls.left_out


def test_more_seconds_begin_with_the_plan_of_fewer(calls):
    """A plan keeps within its time, and a longer one continues it, so that a calibration can be extended."""
    short, long = (calibration_plan(calls.wanted, seconds) for seconds in (3.0, 6.0))

    assert sum(one.cost_s for one in short) <= 3.0
    assert len(short) < len(long)
    affordable = [one for one in long if one in short]
    assert affordable[: len(short) // 2] == short[: len(short) // 2]


def test_no_kind_is_measured_without_end(calls):
    """However much time there is, a kind and phase has a limited number of calls."""
    counts = Counter((one.call.kind, one.call.phase) for one in calibration_plan(calls.wanted, 1e6))

    assert max(counts.values()) <= MOST_CALLS


def test_unlike_shapes_come_before_those_that_are_nearly_known():
    """A shape beside one that is measured adds little, however large its share; a far one with less comes first."""
    plan = calibration_plan([product(1024, 0.4), product(1100, 0.35), product(64, 0.1)], 10.0)

    assert [one.call.shape[0] for one in plan] == [1024, 64, 1100]


def test_what_takes_longer_than_there_is_time_is_skipped():
    """A call that does not fit is passed over for the ones that do."""
    plan = calibration_plan([product(1024, 0.9, predicted_s=100.0), product(64, 0.1)], 10.0)

    assert [one.call.shape[0] for one in plan] == [64]


def test_a_plan_tells_of_most_of_the_steps(calls):
    """With ten seconds most of the share lies within a length scale of a measured shape."""
    plan = calibration_plan(calls.wanted, 10.0)
    kinds = {(one.call.kind, one.call.phase) for one in plan}

    assert sum(one.share for one in calls.wanted if (one.call.kind, one.call.phase) in kinds) > 0.75
    assert np.mean([one.share for one in plan]) > np.mean([one.share for one in calls.wanted])
