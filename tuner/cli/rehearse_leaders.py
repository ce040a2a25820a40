"""The candidates that a study would try first, rehearsed together: `meshtune rehearse --leaders`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from hardware.io.errors import ConfigError
from tuner.cli.options import FOUND_NOTHING, with_plans
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import LAYOUT, in_words, layout_columns, print_json, printable, say, tell_columns, warn
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from tuner.forecast.prepared import Prepared
    from tuner.rehearsal.candidates import Candidate, CandidateAnswer
    from tuner.rehearsal.memory import RehearsedMemory
    from tuner.study_file.request import StudyRequest

LIMIT_S = 60.0
"""Default time limit for each candidate [s]."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leader:
    """Candidate to rehearse: its place in the ranking, from 1, its configuration and values, and how it runs."""

    place: int
    config: ParallelConfig
    values: dict[str, Any]
    candidate: Candidate


def rehearse_leaders(
    request: StudyRequest, count: int, *, again: bool, limit_s: float | None, unconfined: bool, as_json: bool
) -> None:
    """Rehearse the first candidates of the ranking as one rank of each stage, and print a row for each.

    Args:
        request: Study.
        count: Number of candidates.
        again: Whether candidates with a kept answer are rehearsed again.
        limit_s: Time limit of all [s]; None for LIMIT_S for each.
        unconfined: Whether the program runs without a boundary if none is possible.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: The study's trials start no program that can be rehearsed here.
    """
    from tuner.rehearsal.candidates import CandidateAnswer
    from tuner.storage.history import make_tables
    from tuner.storage.opening import open_store
    from tuner.storage.rehearsals import keep_rehearsal, kept_rehearsals

    prepared = with_plans(request, StoredStudies(request.storage))
    leaders = _leaders(prepared, count)
    store = open_store(request.storage)
    make_tables(store)
    kept = {} if again else _by_key(row.answer for row in kept_rehearsals(store, request.name))
    answers = {leader.candidate.key: kept[leader.candidate.key] for leader in leaders if leader.candidate.key in kept}
    left = [leader for leader in leaders if leader.candidate.key not in answers]
    taken = f", {len(answers)} of them rehearsed before" if answers else ""
    say(f"Rehearsing the first {len(leaders)} candidates of the ranking{taken}", err=True)
    every_s = LIMIT_S * len(left) if limit_s is None else limit_s
    for answer in _rehearsed(prepared, [leader.candidate for leader in left], every_s, unconfined=unconfined):
        alike = [leader for leader in left if leader.candidate.key == answer.key]
        answers[answer.key] = answer
        for leader in alike:
            keep_rehearsal(store, request.name, leader.values, answer.as_json())
        say(f"{len(answers)} of {len(leaders)}: {in_words(alike[0].values)}: {answer.verdict}", err=True)
    store.close()
    for leader in leaders:
        answers.setdefault(
            leader.candidate.key,
            CandidateAnswer(key=leader.candidate.key, verdict="unknown", error=f"not rehearsed within {every_s:g} s"),
        )
    rows = [(leader, answers[leader.candidate.key]) for leader in leaders]
    memory = [_memory(prepared, leader.config, answer) for leader, answer in rows]
    if as_json:
        print_json({"leaders": [_row(*row, found) for row, found in zip(rows, memory, strict=True)]})
    else:
        _print_rows(prepared, rows, memory)
    if any(answer.verdict != "accepted" for _, answer in rows):
        raise typer.Exit(FOUND_NOTHING)


def _by_key(stored: Iterator[Any]) -> dict[str, CandidateAnswer]:
    """Return the stored answers that say something, by their keys."""
    from tuner.rehearsal.candidates import CandidateAnswer

    answers = filter(None, map(CandidateAnswer.from_json, stored))
    return {answer.key: answer for answer in answers if answer.verdict != "unknown"}


def _leaders(prepared: Prepared, count: int) -> list[_Leader]:
    """Return the first candidates of the ranking.

    Raises:
        ConfigError: There are none, or their trials start no program that can be rehearsed here.
    """
    from hardware.compute_capability import capability_of
    from tuner.answers.basis import basis_of
    from tuner.answers.predictions import rank_candidates
    from tuner.rehearsal.candidates import candidate_of

    grid, device = prepared.candidates.space.grid, prepared.problem.cluster.devices[0]
    if not len(grid):
        raise ConfigError("leaves no candidate", key="space", file=prepared.request.file, nearest="meshtune space")
    if capability_of(device) is None:
        warn([f"the compute capability of {device.name} is not known here; the program is told 9.0, that of H100"])
    ranked = rank_candidates(
        prepared,
        basis_of(prepared.request, StoredStudies(prepared.request.storage), prepared),
        on_progress=lambda note: warn([note]),
        heeds_rehearsals=False,  # so that the same leaders are told again
    )
    found = []
    for place, position in enumerate(ranked.order[:count].tolist(), start=1):
        config = prepared.problem.with_knobs(grid.config(position))
        try:
            candidate = candidate_of(prepared.backend, config, device, os.environ)
        except ConfigError as error:
            raise error.in_file(prepared.request.file) from None
        values = {**grid.values(position), **dict(config.knobs)}
        found.append(_Leader(place=place, config=config, values=values, candidate=candidate))
    return found


def _rehearsed(
    prepared: Prepared, candidates: list[Candidate], limit_s: float, *, unconfined: bool
) -> Iterator[CandidateAnswer]:
    """Yield the answers of candidates as they come, those of one program with one import."""
    from tuner.capture.run_script import NoBoundaryError
    from tuner.rehearsal.candidates import by_program, whole_answers
    from tuner.rehearsal.run import rehearse

    device = prepared.problem.cluster.devices[0]
    distinct = list({candidate.key: candidate for candidate in candidates}.values())
    try:
        for group in by_program(distinct):
            cases = [case for candidate in group for case in candidate.cases]
            answers = rehearse(cases, device=device, limit_s=limit_s, unconfined=unconfined, environment=os.environ)
            yield from whole_answers(group, answers)
    except NoBoundaryError as error:
        rule = f"runs no program of which nothing keeps this machine apart ({error})"
        raise ConfigError(rule, key="rehearse", nearest="--unconfined runs it all the same") from None


def _memory(prepared: Prepared, config: ParallelConfig, answer: CandidateAnswer) -> RehearsedMemory | None:
    from tuner.rehearsal.memory import rehearsed_memory

    try:
        setting = prepared.problem.subject.setting
    except ConfigError:  # a step of the user's own is predicted as a whole
        return None
    return rehearsed_memory(setting, config, answer.peaks_bytes) if answer.verdict == "accepted" else None


def _row(leader: _Leader, answer: CandidateAnswer, memory: RehearsedMemory | None) -> dict[str, Any]:
    return {
        "rank": leader.place,
        "config": leader.values,
        "verdict": answer.verdict,
        "error": answer.error,
        "where": list(answer.where),
        "peaks_bytes": list(answer.peaks_bytes),
        "stage": memory and memory.stage,
        "peak_bytes": memory and memory.peak_bytes,
        "predicted_bytes": memory and memory.predicted_bytes,
        "needed_bytes": memory and memory.needed_bytes,
        "capacity_bytes": memory and memory.capacity_bytes,
        "cpu_s": answer.cpu_s,
    }


def _print_rows(
    prepared: Prepared, rows: list[tuple[_Leader, CandidateAnswer]], memory: list[RehearsedMemory | None]
) -> None:
    """Print the table, and the words of the framework about what it refused."""
    dimensions = prepared.problem.subject.columns(prepared.candidates.space.grid.dimensions)
    figures = [
        ("-",) * 5
        if found is None
        else (
            str(found.stage),
            f"{found.peak_bytes / _GIB:.2f}",
            f"{found.predicted_bytes / _GIB:.2f}",
            f"{found.needed_bytes / _GIB:.2f}" + ("!" if found.needed_bytes > found.capacity_bytes else ""),
            f"{found.capacity_bytes / _GIB:.1f}",
        )
        for found in memory
    ]
    places = {"rank": [str(leader.place) for leader, _ in rows]}
    heads = ("stage", "tensors [GiB]", "predicted", "needed", "of")
    beside: dict[str, list[str]] = {"verdict": [answer.verdict for _, answer in rows]}
    beside |= {head: [cells[at] for cells in figures] for at, head in enumerate(heads)}
    layouts = [{name: leader.values[name] for name in dimensions} for leader, _ in rows]
    columns = places | layout_columns(layouts, places | beside) | beside
    words = [at for at, head in enumerate(columns) if head == LAYOUT]
    print_table(list(columns), list(zip(*columns.values(), strict=True)), left=words)
    tell_columns(layouts, columns)
    for leader, answer in rows:
        if answer.verdict != "accepted":
            typer.echo(f"{leader.place}: {answer.verdict}: {printable(answer.in_words)}")
    if any(found is not None and found.needed_bytes > found.capacity_bytes for found in memory):
        typer.echo("! does not fit: tensors with what the device adds to them exceed its memory", err=True)
