"""Hosts that a study needs, as its run looks after them."""

import pytest

from tuner.run.hosts import Expected, HostWatch


@pytest.mark.parametrize(
    ("there", "finds_others", "lost_some"),
    [((0, 1), False, None), (None, False, None), ((), False, None), ((0,), True, True), ((0, 1, 2), True, False)],
)
def test_other_hosts_end_a_run(there, finds_others, lost_some):
    """Fewer hosts end it, and more; those that nobody knows of do not."""
    watch = HostWatch(Expected(hosts=(0, 1), now=lambda _running, _elapsed_s: there))

    assert watch.finds_others(None, 0.0) is finds_others
    assert watch.others == (there if finds_others else ())
    if finds_others:
        assert watch.lost_some is lost_some


def test_a_study_may_need_no_hosts():
    """It never finds others."""
    assert not HostWatch(None).finds_others(None, 0.0)
