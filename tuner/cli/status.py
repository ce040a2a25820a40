"""Command `meshtune status`: the progress of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from hardware.rounding import measured
from tuner.cli.options import AsJson, Overrides, Storage, StudyFile, load
from tuner.terminal.console import (
    confidence_in_words,
    in_words,
    print_device_time,
    print_extrapolated,
    print_failed,
    print_in_training,
    print_json,
    print_judged,
    print_taken,
    pruned_in_words,
    say,
)

SHOWN_REHEARSALS = 8
"""Candidates that rehearsals rule out which are printed."""

if TYPE_CHECKING:  # these load numpy and Optuna
    from tuner.answers.fewer_hosts import OnFewerHosts
    from tuner.answers.rehearsals import ToldRehearsal
    from tuner.search.population import Moment
    from tuner.search.proxy.extrapolation import Extrapolated
    from tuner.storage.record import TrialRecord
    from tuner.study_file.request import StudyRequest


def status(study: StudyFile, storage: Storage = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show the progress of a study, which may be running."""
    request = load(study, overrides, storage)

    from tuner.answers.fewer_hosts import phases_of
    from tuner.answers.gain import compared_in, gains
    from tuner.answers.reference import reference_of
    from tuner.economics.device_time import device_time_json
    from tuner.economics.training import limited_of
    from tuner.forecast.planned_candidates import prepare_stored
    from tuner.run.studies import is_driven, is_running, stored_study
    from tuner.search.population import P_STAR, read_moments
    from tuner.search.stopping import StopReason
    from tuner.search.waiting import SLOTS, Slots
    from tuner.storage.record import (
        HISTORY,
        STOP_REASON,
        answer_of,
        counted,
        excused_in_words,
        num_failed,
        num_running,
        read_records,
    )
    from tuner.storage.stored_studies import StoredStudies

    studies = StoredStudies(request.storage)
    stored = stored_study(request, studies)
    prepared = prepare_stored(request, stored)
    records = read_records(stored)
    best, extrapolated = answer_of(records, stored.user_attrs)
    best_s = best.step_time_s if best else None
    phases, running = phases_of(request, studies), is_running(stored)
    in_flight = num_running(records) if running else 0
    slots = Slots.from_json(stored.user_attrs.get(SLOTS) if running else None)
    under_way = next((phase for phase in phases if is_driven(phase.attributes)), None)
    moments = read_moments(stored)
    compared = compared_in(prepared.problem, reference_of(prepared.problem, stored), records, best, stored.user_attrs)
    training = limited_of(prepared, best, extrapolated)
    payload = {
        "study_name": request.name,
        **counts(records),
        "running": in_flight,
        **slots.state_of(in_flight),
        **device_time_json(request, compared, records),
        "clock": request.trials.backend.clock,
        "best_step_time_s": extrapolated.step_time_s if extrapolated else best_s,
        **gains(compared),
        "training": training and training.as_json(prepared.problem.dimensions),
        "extrapolated": extrapolated is not None,
        "in_training": request.trials.backend.in_training(),
        "p_star": stored.user_attrs.get(P_STAR, 0.0),
        "stop_reason": None if running or under_way else stored.user_attrs.get(STOP_REASON, "interrupted"),
        "population": asdict(moments[-1]) if moments else None,
        "fewer_hosts": [phase.as_json() for phase in phases],
        "rehearsed": [one.as_json() for one in _rehearsed(request)],
    }
    if as_json:
        print_json(payload)
        return
    stopped = f"stopped: {StopReason(payload['stop_reason']).sentence}" if payload["stop_reason"] else ""
    state = (
        f"running on {under_way.hosts_in_words}"
        if under_way
        else stopped or ", ".join(filter(None, (f"{in_flight} trials running", slots.in_words(in_flight))))
    )
    ended, excused = counted(records), excused_in_words(records)
    say(f"{request.name}: {len(ended)} trials, {num_failed(ended)} failed; {'; '.join(filter(None, (excused, state)))}")
    print_failed(records)
    print_taken(records)
    if payload["pruned"]:
        say(f"{pruned_in_words(payload['pruned'], payload['saved_s'])}.")
    _print_rehearsed(_rehearsed(request))
    if stored.user_attrs.get(HISTORY):
        typer.echo(stored.user_attrs[HISTORY])
    _print_best(request, best, extrapolated, payload["p_star"])
    if best or extrapolated:
        print_judged(request, compared, training, None)
    print_device_time(request, compared, records)
    print_in_training(payload)
    _print_phases(phases)
    _print_population(moments, records)


def _print_population(moments: Sequence[Moment], records: Sequence[TrialRecord]) -> None:
    from tuner.report.words import after_trials
    from tuner.search.population import in_lines

    if moments:
        typer.echo("\n".join(in_lines(moments[-1], after_trials(records, moments[-1].trial), in_words)))


def _print_phases(phases: Sequence[OnFewerHosts]) -> None:
    for phase in phases:
        say(f"Ran besides: {phase.in_words}")


def _rehearsed(request: StudyRequest) -> list[ToldRehearsal]:
    from tuner.answers.rehearsals import told_rehearsals

    return told_rehearsals(request)


def _print_rehearsed(told: Sequence[ToldRehearsal]) -> None:
    """Print how many candidates were rehearsed, and why some of them are not tried."""
    from tuner.answers.rehearsals import rehearsals_in_words

    if not told:
        return
    say(rehearsals_in_words(told))
    ruled_out = [one for one in told if one.in_words]
    for one in ruled_out[:SHOWN_REHEARSALS]:
        say(f"  {in_words(one.config)}: {one.in_words}")
    if len(ruled_out) > SHOWN_REHEARSALS:
        say(f"  and {len(ruled_out) - SHOWN_REHEARSALS:,} more, which --json lists")


def _print_best(
    request: StudyRequest, best: TrialRecord | None, extrapolated: Extrapolated | None, confidence: float
) -> None:
    """Print the best configuration so far, if there is one."""
    if best is not None and best.step_time_s is not None:
        say(f"Best: {in_words(best.params)}")
        source = request.trials.backend.source_in_words
        say(f"  {measured(best.step_time_s)} s per step ({source}); {confidence_in_words(request.problem, confidence)}")
    elif extrapolated is not None:
        print_extrapolated(extrapolated)


def counts(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Return the numbers of trials under the keys of JSON."""
    from tuner.storage.record import num_failed, num_proxies, num_pruned, saved_s

    return {
        "trials": sum(record.finished for record in records),
        "proxies": num_proxies(records),
        "failed": num_failed(records),
        "pruned": num_pruned(records),
        "saved_s": saved_s(records),
    }
