"""Runs real studies while it kills at random, and checks from outside what must hold.

    python -m tests.chaos [--rounds 12] [--seconds S] [--seed 0] [--storages ...] [--trials ...] [--faults ...] [--json]

A round is one study, on SQLite, PostgreSQL or a journal, whose trials run a command, are jobs of a Slurm cluster, train
with torch, replay published measurements or are simulated, under a driver that starts Ray by itself or joins a cluster
of several raylets. Its faults follow a schedule that the seed and the number of the round make: `--seed S --first N
--rounds 1` plays round N of seed S again. Then a driver without faults ends the study, and the invariants of
invariants.py are checked on what the trials themselves have written, on the rows of the storage, and on the tables of
processes, jobs, shared memory and ports.

The exit status is 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from benchmarks.support.postgresql_server import PostgresqlServer, server_programs
from benchmarks.support.ray_nodes import NotStartedError
from benchmarks.support.timing import answer, count_at_least, publish, reasons, tell
from hardware.io.errors import ConfigError
from tests.chaos.disk import why_no_disk
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import Played, Stage, by_kind, planned
from tests.chaos.studies import RAYS, STORAGES, TRIALS
from tests.support.own_slurm import own_slurm, why_no_slurm

BROKEN_OFF = "rounds with a node that did not start"
PASSWORD = "chaos"  # noqa: S105 # of a server that lives as long as this program


def main(argv: Sequence[str] | None = None) -> int:
    """Plays all rounds; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count_at_least(1), default=12, help="each a study (12)")
    parser.add_argument("--first", type=count_at_least(0), default=0, help="number of the first round (0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no round begins later than this")
    parser.add_argument("--seed", type=count_at_least(0), default=0, help="of the schedules (0)")
    parser.add_argument("--storages", nargs="+", choices=STORAGES, default=STORAGES, help="one after the other (all)")
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=TRIALS, help="of the studies (all)")
    parser.add_argument("--rays", nargs="+", choices=RAYS, default=RAYS, help="under the drivers (both)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=tuple(FAULTS), help="that may strike (all)")
    parser.add_argument("--most", type=count_at_least(1), default=6, help="faults of a round (6)")
    parser.add_argument("--budget", type=count_at_least(2), default=20, help="trials of a study (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    violations: list[str] = []

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        figures = _measure(given)
        violations.extend(figures["violations"])
        return figures

    return answer("chaos", parser.parse_args(argv), measure, _print) or bool(violations)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    storages = [name for name in given.storages if name != "postgresql" or server_programs() is not None]
    skipped = {}
    if len(storages) < len(given.storages):
        skipped["PostgreSQL, whose server is not installed"] = 1
    trials = [name for name in given.trials if name != "slurm" or not why_no_slurm()]
    if len(trials) < len(given.trials):
        skipped[f"jobs: {why_no_slurm()}"] = 1
    if "torch" in trials and find_spec("torch") is None:
        trials.remove("torch")
        skipped["training, for want of torch"] = 1
    if not trials:
        raise ConfigError("cannot run here", key="--trials", value=" ".join(given.trials))
    if why_no_disk():
        skipped[f"full disks: {why_no_disk()}"] = 1
    if not storages:
        raise ConfigError("have no server here", key="--storages", value=" ".join(given.storages))
    begin_s = time.monotonic()
    futures: list[Future[Played]] = []
    with ExitStack() as stack:
        server = None
        if "postgresql" in storages:
            server = PostgresqlServer(PASSWORD)
            stack.callback(server.close)
            server.start()
        slurm = stack.enter_context(own_slurm(num_nodes=2)) if "slurm" in trials else None
        stage = Stage(server, slurm)
        for number in range(given.first, given.first + given.rounds):
            if time.monotonic() - begin_s >= given.seconds:
                break
            which = planned(
                number,
                given.seed,
                storages=storages,
                trials=trials,
                rays=given.rays,
                faults=given.faults,
                most_faults=given.most,
                budget=given.budget,
            )
            tell(f"round {number}: {which.storage}, {which.trials}, {which.ray}")
            try:
                futures.append(stage.play(which))
            except NotStartedError:
                tell("  broken off: a node of its cluster did not start")
                skipped[BROKEN_OFF] = skipped.get(BROKEN_OFF, 0) + 1
        played = [future.result() for future in futures]
    return {
        "seed": given.seed,
        "rounds": [
            {
                "round": one.round.number,
                "storage": one.round.storage,
                "trials_are": one.round.trials,
                "ray": one.round.ray,
                "faults": list(one.struck),
                "drivers": one.drivers,
                "trials": one.trials,
                "seconds": round(one.seconds, 1),
                "violations": len(one.violations),
            }
            for one in played
        ],
        "faults": by_kind(played),
        "trials": sum(one.trials for one in played),
        "skipped": reasons(skipped),
        "violations": [
            f"seed {given.seed}, round {one.round.number}: {told}" for one in played for told in one.violations
        ],
    }


def _print(figures: dict[str, Any]) -> None:
    publish([{**row, "faults": len(row["faults"])} for row in figures["rounds"]], as_json=False)
    print()
    publish([{"fault": name, "struck": count} for name, count in figures["faults"].items()], as_json=False)
    print()
    print(
        f"{sum(figures['faults'].values())} faults in {len(figures['rounds'])} rounds, {figures['trials']} trials, "
        f"{len(figures['violations'])} violations {figures['skipped']}".rstrip()
    )
    for violation in figures["violations"]:
        print(violation)


if __name__ == "__main__":
    sys.exit(main())
