"""Note on a trial's page: its configuration, its predicted and measured figures, and how it ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from costmodels.surrogates.uncertainty import likely_range
from hardware.rounding import MEASURED_DIGITS, PREDICTED_DIGITS, rounded
from trials.backend import Status
from tuner.answers.reference import Reference
from tuner.dashboard.markdown import block, code, paragraphs, plain, table
from tuner.dashboard.study_note import STATUS_WORDS
from tuner.report.sections.accuracy import relative_error
from tuner.report.words import MISSING, gibibytes, percent, plural, predicted_seconds, seconds
from tuner.storage.record import TrialRecord
from tuner.study_file.request import StudyRequest, TrialOptions
from tuner.subject.ability import Ability
from tuner.subject.problem import Problem
from tuner.terminal.console import in_words

GIB = 2**30

SHOWN_STEPS = 20
"""Number of step times listed individually."""

LOG_LINES = 20
"""Number of lines shown from the end of the log."""

LOG_CHARACTERS = 3_000
"""Largest number of characters of these lines: a page loads the notes of all trials at once."""

LEAST_PART = 0.005
"""Share of the predicted step below which a part is not listed."""


def trial_note(
    request: StudyRequest,
    record: TrialRecord,
    reference: Reference | None,
    step_error: float | None,
    logs: Sequence[str] = (),
) -> str:
    """Compose the trial's note.

    `step_error` is the half-width of the 68% interval of the logarithm of the step time. The logs are the names of the
    trial's complete logs among the page's artifacts.
    """
    role = _role(record, reference)
    return paragraphs(
        f"### {_headline(request.trials, record)}",
        code(in_words(record.params)) + (f", {role}" if role else ""),
        _proxy(record),
        _reason(record),
        _figures(request.problem, record, step_error),
        _parts(record),
        _steps(record),
        _log(record, logs),
    )


def trial_facts(record: TrialRecord, reference: Reference | None) -> dict[str, Any]:
    """Collect the figures shown as the trial's attributes: columns of the dashboard's table of trials."""
    observation, error = record.observation, relative_error(record)
    predicted_bytes = record.prediction.get("peak_memory_bytes")
    measured_bytes = observation.peak_memory_bytes if observation and not record.is_proxy else None
    facts: dict[str, Any] = {
        "status": _status(record),
        "predicted step [s]": record.predicted_s,
        "prediction error [%]": None if error is None else 100 * error,
        "predicted memory [GiB]": None if predicted_bytes is None else predicted_bytes / GIB,
        "memory [GiB]": None if measured_bytes is None else measured_bytes / GIB,
        "confidence after it": record.p_star,
        "role": _role(record, reference) or None,
        "reason": (observation.reason if observation else "") or None,
    }
    return {
        name: rounded(value, PREDICTED_DIGITS if name.startswith("predict") else MEASURED_DIGITS)
        if isinstance(value, float)
        else value
        for name, value in facts.items()
        if value is not None
    }


def _status(record: TrialRecord) -> str:
    words = STATUS_WORDS[record.status] if record.status else record.unfinished_in_words
    return f"proxy: {words}" if record.is_proxy else words


def _role(record: TrialRecord, reference: Reference | None) -> str:
    return reference.in_words if reference is not None and record.params == reference.values else ""


def _headline(trials: TrialOptions, record: TrialRecord) -> str:
    if record.step_time_s is None:
        return _status(record)
    return f"{seconds(record.step_time_s)} per step, {trials.backend.source_in_words}"


def _proxy(record: TrialRecord) -> str:
    """Describe the proxy job that ran for the candidate."""
    if record.proxy is None:
        return ""
    smaller, measured_s = record.proxy, record.observation.step_time_s if record.observation else None
    return (
        f"A proxy job ran in its place: {code(in_words(smaller.config.values()))}, "
        f"{plural(smaller.reduction.layers, 'layer')}, {plural(smaller.reduction.global_batch_size, 'sequence')} on "
        f"{plural(smaller.config.num_devices, 'device')}"
        + (f"; its step took {seconds(measured_s)}" if measured_s else "")
    )


def _reason(record: TrialRecord) -> str:
    reason = record.observation.reason if record.observation else ""
    return f"**Reason**: {plain(reason)}" if reason else ""


def _figures(problem: Problem, record: TrialRecord, step_error: float | None) -> str:
    predicted, observation = record.prediction, None if record.is_proxy else record.observation
    if not predicted:
        return ""
    step_s, measured_s = predicted["step_time_s"], record.step_time_s
    known = ""
    if step_error is not None:
        low_s, high_s = likely_range(step_s, step_error)
        known = f" ({predicted_seconds(low_s)} to {predicted_seconds(high_s)})"
    error = relative_error(record)
    off = "" if error is None else f", {percent(error, signed=True)} off"
    throughputs = [
        MISSING if told_s is None or (found := problem.subject.throughput(told_s)) is None else f"{found:,.0f}"
        for told_s in (step_s, measured_s)
    ]
    return table(
        ["", "predicted", "measured"],
        [
            ["step", predicted_seconds(step_s) + known + off, seconds(measured_s)],
            *([["tokens/s per device", *throughputs]] if problem.subject.has(Ability.TOKENS) else []),
            [
                "memory of the fullest device",
                f"{gibibytes(predicted['peak_memory_bytes'])} of {gibibytes(predicted['memory_capacity_bytes'])}",
                gibibytes(observation.peak_memory_bytes if observation else None),
            ],
        ],
    ) + ("\n\nThe range was predicted to contain the step time with a probability of 68%." if known else "")


def _parts(record: TrialRecord) -> str:
    """List the parts of the predicted step time."""
    parts: dict[str, float] = record.prediction.get("breakdown_s", {})
    whole_s = sum(parts.values())
    told = [
        f"{part} {percent(part_s / whole_s)}"
        for part, part_s in sorted(parts.items(), key=lambda entry: -entry[1])
        if part_s > LEAST_PART * whole_s
    ]
    return f"Parts of the predicted step: {', '.join(told)}" if told else ""


def _steps(record: TrialRecord) -> str:
    observation = record.observation
    if observation is None:
        return ""
    steps_s, words = observation.step_times_s, []
    if steps_s:
        shown = ", ".join(seconds(step_s) for step_s in steps_s[:SHOWN_STEPS])
        more = ", ..." if len(steps_s) > SHOWN_STEPS else ""
        median = f"; median {seconds(statistics.median(steps_s))}" if len(steps_s) > 1 else ""
        words.append(f"{plural(len(steps_s), 'measured step')}: {shown}{more}{median}")
    if observation.elapsed_s is not None:
        startup = f", of which {seconds(observation.startup_s)} outside these steps" if observation.startup_s else ""
        words.append(f"The trial took {seconds(observation.elapsed_s)}{startup}")
    if observation.status is Status.TIMEOUT and observation.time_limit_s is not None:
        words.append(f"It was stopped at its time limit of {seconds(observation.time_limit_s)}")
    return paragraphs(*words)


def _log(record: TrialRecord, logs: Sequence[str]) -> str:
    tail = record.observation.log_tail if record.observation else ""
    whole = f"Complete logs: {', '.join(map(code, logs))}, below under Artifacts" if logs else ""
    if not tail.strip():
        return whole
    shown = "\n".join(tail.rstrip().splitlines()[-LOG_LINES:])[-LOG_CHARACTERS:]
    cut = "" if shown == tail.rstrip() else "..."
    return paragraphs("#### End of the log", block(f"{cut}\n{shown}" if cut else shown), whole)
