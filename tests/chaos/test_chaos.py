"""The harness itself, in a short form: a study of commands that meets most faults, and one of Slurm jobs."""

import pytest

from tests.chaos.__main__ import PASSWORD
from tests.chaos.disk import why_no_disk
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Stage, by_kind
from tests.chaos.studies import Round, Strike
from tests.support.own_server import own_server
from tests.support.own_slurm import own_slurm

SHORT = (
    "kill trial",
    "take trial's memory",
    "kill rank",
    "kill worker",
    "stop database",
    "fill disk",
    "suspend driver",
    "kill database session",
    "kill driver",
    "kill node's raylet",
)
"""The other ways to stop a driver, a database and Ray are left to the long form (`make chaos`)."""

OF_JOBS = ("kill trial", "kill rank", "cancel job", "kill driver")
"""Faults that meet jobs where they differ from commands."""


def round_of(faults, **kinds):
    """Return the round of these faults, one after the other."""
    strikes = (Strike(fault=name, is_early=False, delay_s=0.1, hold_s=0.4, pick=0) for name in faults)
    which = Round(number=0, seed=0, seconds=0.0, strikes=tuple(strikes), **kinds)
    assert all(FAULTS[name].suits(which.storage, which.trials, which.ray) for name in faults)
    return which


def assert_promises_kept(played, faults):
    """All faults have struck, the driver's death among them, and nothing is violated."""
    assert played.violations == ()
    assert played.trials >= played.round.budget
    assert [name for name, count in by_kind([played]).items() if count] == sorted(faults, key=list(FAULTS).index)
    assert played.drivers >= 2


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
    which = round_of(faults, storage="postgresql", trials="command", ray="nodes", budget=16)

    assert_promises_kept(Stage(server).play(which).result(), faults)


def test_a_disturbed_study_of_jobs_keeps_its_promises():
    """A study of Slurm jobs whose programs, followers, jobs and driver fail keeps the same, and leaves no job."""
    which = round_of(OF_JOBS, storage="sqlite", trials="slurm", ray="local", budget=8)

    with own_slurm(num_nodes=2) as slurm:
        played = Stage(None, slurm).play(which).result()

    assert_promises_kept(played, OF_JOBS)
