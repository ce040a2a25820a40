"""A round: one study, its faults by a schedule that its number and a seed make, and what did not hold after it."""

from __future__ import annotations

import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.support.postgresql_server import PostgresqlServer
from benchmarks.support.process_table import session_processes
from benchmarks.support.timing import tell
from tests.chaos.disk import why_no_disk
from tests.chaos.faults import FAULTS, FILL_DISK
from tests.chaos.invariants import Disturbed, violations
from tests.chaos.ledger import read_ledger
from tests.chaos.left_behind import Held, Watch, held_now
from tests.chaos.scene import Scene, send
from tests.chaos.studies import RAYS, STORAGES, TRIALS, Round, Strike, undisturbed
from tests.support.own_slurm import OwnSlurm

LIVES = 4
"""Drivers that are started after the last fault before the study counts as one that does not end."""

EARLY = 0.3
"""The share of the faults that can that come while a driver starts."""

VICTIM_LIMIT_S = 20.0
"""How long a fault waits for something to hit while trials run."""

GONE_LIMIT_S = 15.0
"""How long what a killed driver had started may take to go: ten seconds, and more where other rounds take the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What came of a round.

    Attributes:
        round: What was played.
        struck: The faults that hit, in their order.
        trials: That ended.
        drivers: That were started.
        seconds: Wall time.
        violations: What does not hold.
    """

    round: Round
    struck: tuple[str, ...]
    trials: int
    drivers: int
    seconds: float
    violations: tuple[str, ...]


def planned(
    number: int,
    seed: int,
    *,
    storages: Sequence[str] = STORAGES,
    trials: Sequence[str] = TRIALS,
    rays: Sequence[str] = RAYS,
    faults: Sequence[str] = tuple(FAULTS),
    most_faults: int = 6,
    budget: int = 20,
) -> Round:
    """The round of that number: the same for the same seed and choices."""
    rng = np.random.default_rng([seed, number])
    storage = storages[number % len(storages)]
    kind = str(rng.choice(trials, p=_shares(trials)))
    ray = str(rng.choice(rays))
    suiting = [
        name
        for name in faults
        if FAULTS[name].suits(storage, kind, ray) and not (name == FILL_DISK.name and why_no_disk())
    ]
    # all that suit, in any order, before one comes again
    orders = (rng.permutation(suiting) for _ in range(math.ceil(most_faults / max(len(suiting), 1))))
    chosen = [str(name) for order in orders for name in order][:most_faults]
    return Round(
        number=number,
        storage=storage,
        trials=kind,
        ray=ray,
        budget=budget,
        seed=int(rng.integers(1000)),
        seconds=0.8,
        strikes=tuple(
            Strike(
                fault=name,
                is_early=FAULTS[name].may_be_early and bool(rng.random() < EARLY),
                delay_s=float(rng.uniform(0.0, 1.5)),
                hold_s=float(rng.uniform(0.5, 4.0)),
                pick=int(rng.integers(1000)),
            )
            for name in chosen
        ),
    )


def _shares(trials: Sequence[str]) -> list[float]:
    """Commands come twice as often: only they have processes of their own and a ledger."""
    weights = [2.0 if kind == "command" else 1.0 for kind in trials]
    return [weight / sum(weights) for weight in weights]


class Stage:
    """Plays rounds one after the other; what they leave behind is judged while the next ones run.

    Args:
        server: For the rounds on PostgreSQL.
        slurm: For the rounds whose trials are jobs.
    """

    def __init__(self, server: PostgresqlServer | None, slurm: OwnSlurm | None = None) -> None:
        # a program that was started in the background may have inherited that Ctrl-C means nothing, and pass it on
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # clusters are ended whoever ends the rounds
        self._server = server
        self._slurm = slurm
        self._judges = ThreadPoolExecutor()

    def play(self, which: Round) -> Future[Played]:
        """Plays a round to its end; what came of it is known once its processes have gone, or should have."""
        begin_s = time.monotonic()
        folder = tempfile.TemporaryDirectory(prefix="meshtune-")
        scene = Scene(which, Path(folder.name), self._server, self._slurm)
        before, watch = held_now(scene.mark), Watch(scene.mark)
        watch.start()
        try:
            with folder, scene:
                struck = tuple(strike.fault for strike in which.strikes if _dealt(scene, strike))
                _finish(scene)
                scene.keep_moment()
                study = Disturbed(
                    budget=which.budget,
                    ledger=read_ledger(scene.ledger),
                    moments=tuple(scene.moments[:-1]),
                    stored=scene.moments[-1],
                    answer=scene.answer,
                    ends=tuple(scene.ends),
                    undisturbed=undisturbed(which.budget, which.seed) if which.trials == "replay" else None,
                    before=before,
                    harmed=tuple(scene.harmed),
                )
        except BaseException:
            watch.stop()
            raise
        seconds = time.monotonic() - begin_s

        def judged() -> Played:
            after = _left(scene)
            whole = replace(study, used=watch.stop(), after=after)
            found = tuple(violations(whole))
            tell(f"round {which.number} ended: {len(struck)} faults, {len(found)} violations")
            for violation in found:
                tell(f"  {violation}")
            return Played(
                round=which,
                struck=struck,
                trials=sum(trial.has_ended for trial in whole.stored.trials),
                drivers=len(whole.ends),
                seconds=seconds,
                violations=found,
            )

        return self._judges.submit(judged)


def _dealt(scene: Scene, strike: Strike) -> bool:
    """Hits a driver that lives, or the next one where this one is just ending; whether it did."""
    for _ in range(2):
        if not scene.is_driven:
            if scene.is_over:
                return False
            scene.begin()
        if _hit(scene, strike):
            return True
    return False


def _hit(scene: Scene, strike: Strike) -> bool:
    """Waits for the moment, strikes, undoes, and notes what the storage then holds; whether it hit."""
    fault = FAULTS[strike.fault]
    if strike.is_early:
        scene.wait_for_start()
    elif not scene.wait_for_work():
        return False
    time.sleep(strike.delay_s)
    deadline_s = time.monotonic() + VICTIM_LIMIT_S
    while True:
        if not scene.is_driven or time.monotonic() >= deadline_s:
            return False
        if fault.strike(scene, strike.pick):
            break
        time.sleep(0.05)
    tell(f"  {fault.name}{', early' if strike.is_early else ''}")
    scene.excuse(fault.name, fault.statuses)
    if fault.ends_driver:
        scene.note_end()
    else:
        time.sleep(strike.hold_s)
    fault.undo(scene)
    scene.keep_moment()
    return True


def _finish(scene: Scene) -> None:
    """Drivers without faults until one comes to the end of the study."""
    for _ in range(LIVES):
        if scene.is_driven:
            scene.note_end()
        if scene.is_over:
            return
        scene.begin()
    scene.note_end()


def _left(scene: Scene) -> Held:
    """What is held once the scene's processes and jobs have gone, or have had the time to; then they are killed."""
    deadline_s = time.monotonic() + GONE_LIMIT_S
    while True:
        jobs = scene.jobs()
        held = replace(held_now(scene.mark, scene.drivers), jobs=frozenset(jobs))
        if not (held.processes or jobs) or time.monotonic() >= deadline_s:
            break
        time.sleep(0.5)
    if scene.slurm is not None and jobs:
        scene.slurm.ask("scancel", *jobs, check=False)
    left = scene.processes() | {
        pid: told for driver in scene.drivers for pid, told in session_processes(driver).items()
    }
    for process, command in left.items():
        tell(f"left: {command}")
        send(process, signal.SIGKILL)
    return held


def by_kind(played: Sequence[Played]) -> dict[str, int]:
    """How often each fault hit, those that never did included."""
    counts = Counter(name for one in played for name in one.struck)
    return {name: counts[name] for name in FAULTS}
