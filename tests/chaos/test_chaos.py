"""The harness itself, in a short form: one study that meets most faults, on nodes and PostgreSQL."""

import pytest

from tests.chaos.__main__ import PASSWORD
from tests.chaos.disk import why_no_disk
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Stage, by_kind
from tests.chaos.studies import Round, Strike
from tests.support.own_server import own_server

SHORT = (
    "kill trial",
    "take trial's memory",
    "kill worker",
    "stop database",
    "fill disk",
    "suspend driver",
    "kill database session",
    "kill driver",
    "kill node's raylet",
)
"""The other ways to stop a driver, a database and Ray are left to the long form (`make chaos`)."""


@pytest.fixture
def server():
    """A PostgreSQL server of this test alone, since it is stopped."""
    with own_server(PASSWORD) as own:
        yield own


def test_a_disturbed_study_keeps_its_promises(server):
    """A study of real commands on several nodes, whose trials, workers, nodes, driver, database and disk fail one after
    the other, comes to its end: each trial recorded once, none run after its end, nothing lost, nothing left.
    """
    faults = [name for name in SHORT if name != "fill disk" or not why_no_disk()]
    which = Round(
        number=0,
        storage="postgresql",
        trials="command",
        ray="nodes",
        budget=16,
        seed=0,
        seconds=0.0,
        strikes=tuple(Strike(fault=name, is_early=False, delay_s=0.1, hold_s=0.4, pick=0) for name in faults),
    )
    assert all(FAULTS[name].suits(which.storage, which.trials, which.ray) for name in faults)

    played = Stage(server).play(which).result()

    assert played.violations == ()
    assert played.trials >= which.budget
    assert [name for name, count in by_kind([played]).items() if count] == sorted(faults, key=list(FAULTS).index)
    assert played.drivers >= 2
