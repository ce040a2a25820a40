"""Faults that disturb a study, as a table.

Lifecycle of a fault: a schedule names it for a round that it `suits`; when its moment has come `strike` is called until
it has hit something; after a while `undo`; a driver that ends meanwhile may do so with 0 or with one of its `statuses`.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.support.process_table import below
from tests.chaos.ledger import Entry, read_ledger, running
from tests.chaos.scene import NODES, Scene, send
from tests.chaos.studies import PROGRAMS
from tests.chaos.trial_program import note

RAY_ENDED_IT = 1
"""Status with which Ray ends a driver, from C++ and in its own words, whose raylet or GCS has died."""

GAVE_UP = 2
"""Status of a driver that cannot write, or to whom Ray tells of a death while it starts: one message and no more."""

INTERRUPTED = 130

TOLD_TO_END = 75
"""Status of a driver that got SIGTERM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: Deed and victim in words.
        strike: Strikes, and returns False where there is nothing to hit at this moment; the number picks one of several
            victims by the remainder.
        suits: Whether a round with this storage, these trials and this Ray has what it strikes.
        undo: Puts right what does not come right by itself.
        statuses: Exit statuses that it excuses in a driver.
        ends_driver: Whether it means the driver itself to end.
        may_be_early: Whether it can strike while the driver starts.
    """

    name: str
    strike: Callable[[Scene, int], bool]
    suits: Callable[[str, str, str], bool] = lambda _storage, _trials, _ray: True
    undo: Callable[[Scene], None] = lambda _scene: None
    statuses: frozenset[int] = frozenset()
    ends_driver: bool = False
    may_be_early: bool = False


# A trial's own process


def _runs_programs(_storage: str, trials: str, _ray: str) -> bool:
    return trials in PROGRAMS


def _hit_trial(deed: Callable[[Scene, Entry], bool], scene: Scene, pick: int) -> bool:
    found = running(read_ledger(scene.ledger))
    return bool(found) and deed(scene, found[pick % len(found)])


def _kill_trial(_scene: Scene, entry: Entry) -> bool:
    """Kills that process alone; what it has started is for others to end."""
    return send(entry.pid, signal.SIGKILL)


def _take_memory(scene: Scene, entry: Entry) -> bool:
    """Lowers its limit of memory to what it has, so that its next allocation fails, and notes that in the ledger."""
    try:
        pages = int(Path(f"/proc/{entry.pid}/statm").read_text(encoding="ascii").split()[0])
        limit = (pages * resource.getpagesize(),) * 2
        resource.prlimit(entry.pid, resource.RLIMIT_AS, limit)
    except (OSError, IndexError):  # it has just ended
        return False
    who = {"trial": entry.trial, "configuration": entry.configuration, "pid": entry.pid}
    note(str(scene.ledger), event="limited", time_s=time.time(), **who)
    return True


def _kill_rank(scene: Scene, pick: int) -> bool:
    """Kill a rank, which trains or follows a command or a job, or the server that forks ranks."""
    found = sorted(number for number, command in scene.processes().items() if "trials.ranks.server" in command)
    return bool(found) and send(found[pick % len(found)], signal.SIGKILL)


def _cancel_job(scene: Scene, pick: int) -> bool:
    """Cancel a job as its owner or an administrator would."""
    jobs = scene.jobs()
    if jobs:
        scene.slurm.ask("scancel", jobs[pick % len(jobs)], check=False)
    return bool(jobs)


# Ray: a worker that measures, a raylet, the process that knows the cluster


def _kill_worker(scene: Scene, pick: int) -> bool:
    workers = scene.workers()
    return bool(workers) and send(workers[pick % len(workers)], signal.SIGKILL)


def _kill_node(scene: Scene, pick: int) -> bool:
    """Kills the raylet of a node that works on a trial and is not the last one, with its workers or without."""
    workers = set(scene.workers())
    living = scene.nodes.living
    at_work = [number for number in living if workers & scene.nodes.on_node(number).keys()]
    if len(living) < 2 or not at_work:
        return False
    scene.nodes.kill(at_work[pick % len(at_work)], workers=bool(pick % 2))
    return True


def _kill_of_ray(program: str, scene: Scene, _pick: int) -> bool:
    """Kills the only such process of the Ray that the driver has started."""
    found = [number for number, command in scene.processes().items() if program in command.split(" ")[0]]
    return bool(found) and send(found[0], signal.SIGKILL)


def _kill_keeper(scene: Scene, pick: int) -> bool:
    """Kills one of the processes that end Ray's if the driver is killed."""
    keepers = sorted(number for number, command in scene.processes().items() if "on_ray/keeper.py" in command)
    return bool(keepers) and send(keepers[pick % len(keepers)], signal.SIGKILL)


# The driver


def _kill_with_ray(scene: Scene, pick: int) -> bool:
    """Kills Ray's server, a keeper, a worker at work and the driver, at once and in this order."""
    if not _kill_of_ray("gcs_server", scene, pick):
        return False
    _kill_keeper(scene, pick)
    _kill_worker(scene, pick)
    return _signal_driver(signal.SIGKILL, scene, pick)


def _signal_driver(number: signal.Signals, scene: Scene, pick: int) -> bool:  # noqa: ARG001 # the contract's
    return scene.driver is not None and send(scene.driver.process.pid, number)


def _signal_group(number: signal.Signals, scene: Scene, pick: int) -> bool:  # noqa: ARG001 # the contract's
    """Signal the driver's process group, as terminals and `timeout` do."""
    if scene.driver is None or scene.driver.process.poll() is not None:
        return False
    os.killpg(scene.driver.process.pid, number)
    return True


def _signal_all(number: signal.Signals, scene: Scene, pick: int) -> bool:
    """Signal the driver and all that it has started, in whatever session, as systemd does."""
    if scene.driver is None:
        return False
    for process in below(scene.driver.process.pid):
        send(process, number)
    return _signal_driver(number, scene, pick)


# What holds the study: the database, and the disk under its files


def _stop_database(how: signal.Signals, scene: Scene, _pick: int) -> bool:
    scene.server.stop(how)
    return True


def _kill_session(scene: Scene, pick: int) -> bool:
    """Kills a process of the server, which then ends all sessions, and starts anew by itself."""
    found = sorted(below(scene.server.process.pid))
    return bool(found) and send(found[pick % len(found)], signal.SIGKILL)


def _has_files(storage: str, trials: str, _ray: str) -> bool:
    return storage != "postgresql" or trials in PROGRAMS


def _fill_disk(scene: Scene, _pick: int) -> bool:
    scene.disk.fill()
    return True


def _kill_capture(scene: Scene, pick: int) -> bool:
    """Kills a capture beside the study at some moment from its start to the script's loop."""
    scene.kill_a_capture(0.2 + pick % 40 / 10)
    return True


OF_OWN_RAY = {"suits": lambda _storage, _trials, ray: ray == "local", "statuses": frozenset({RAY_ENDED_IT, GAVE_UP})}
OF_DRIVER = {"ends_driver": True, "may_be_early": True}
OF_DATABASE = {"suits": lambda storage, _trials, _ray: storage == "postgresql", "statuses": frozenset({GAVE_UP})}
STOPS_DATABASE = {**OF_DATABASE, "undo": lambda scene: scene.server.start()}

FILL_DISK = Fault(
    name="fill disk",
    suits=_has_files,
    strike=_fill_disk,
    undo=lambda scene: scene.disk.empty(),
    statuses=frozenset({GAVE_UP}),
)

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="kill trial", suits=_runs_programs, strike=partial(_hit_trial, _kill_trial)),
        Fault(name="take trial's memory", suits=_runs_programs, strike=partial(_hit_trial, _take_memory)),
        Fault(name="kill rank", suits=lambda _storage, trials, _ray: trials in (*PROGRAMS, "torch"), strike=_kill_rank),
        Fault(name="cancel job", suits=lambda _storage, trials, _ray: trials == "slurm", strike=_cancel_job),
        Fault(name="kill worker", strike=_kill_worker),
        Fault(name="kill a capture beside", strike=_kill_capture),
        Fault(
            name="kill node's raylet",
            suits=lambda _storage, _trials, ray: ray == "nodes",
            strike=_kill_node,
            undo=lambda scene: scene.nodes.add(NODES[-1]),
        ),
        Fault(name="kill raylet", strike=partial(_kill_of_ray, "raylet/raylet"), **OF_OWN_RAY),
        Fault(name="kill gcs", strike=partial(_kill_of_ray, "gcs_server"), **OF_OWN_RAY),
        Fault(name="kill keeper", suits=lambda _storage, _trials, ray: ray == "local", strike=_kill_keeper),
        Fault(
            name="kill driver and its Ray",
            suits=lambda _storage, _trials, ray: ray == "local",
            strike=_kill_with_ray,
            statuses=frozenset({-signal.SIGKILL, RAY_ENDED_IT}),
            ends_driver=True,
        ),
        Fault(
            name="kill driver",
            strike=partial(_signal_driver, signal.SIGKILL),
            statuses=frozenset({-signal.SIGKILL}),
            **OF_DRIVER,
        ),
        Fault(
            name="terminate driver",  # as schedulers do
            strike=partial(_signal_driver, signal.SIGTERM),
            statuses=frozenset({TOLD_TO_END}),
            **OF_DRIVER,
        ),
        Fault(
            name="interrupt driver",  # as Ctrl-C does
            strike=partial(_signal_driver, signal.SIGINT),
            statuses=frozenset({INTERRUPTED}),
            **OF_DRIVER,
        ),
        *(
            Fault(
                name=f"{deed} driver's group",
                strike=partial(_signal_group, number),
                statuses=frozenset({status}),
                **OF_DRIVER,
            )
            for deed, number, status in (
                ("terminate", signal.SIGTERM, TOLD_TO_END),
                ("hang up", signal.SIGHUP, TOLD_TO_END),
                ("interrupt", signal.SIGINT, INTERRUPTED),
                ("kill", signal.SIGKILL, -signal.SIGKILL),
            )
        ),
        Fault(
            name="terminate driver and all it started",
            suits=lambda _storage, trials, ray: trials != "slurm" and ray == "local",
            strike=partial(_signal_all, signal.SIGTERM),
            statuses=frozenset({TOLD_TO_END}),
            **OF_DRIVER,
        ),
        Fault(
            name="suspend driver",
            strike=partial(_signal_driver, signal.SIGSTOP),
            undo=partial(_signal_driver, signal.SIGCONT, pick=0),
            may_be_early=True,
        ),
        # in order: transactions are broken off
        Fault(name="stop database", strike=partial(_stop_database, signal.SIGINT), **STOPS_DATABASE),
        # at once: the server mends itself when it starts
        Fault(name="break database off", strike=partial(_stop_database, signal.SIGQUIT), **STOPS_DATABASE),
        Fault(
            name="kill database session", strike=_kill_session, undo=lambda scene: scene.server.wait(), **OF_DATABASE
        ),
        FILL_DISK,
    )
}
