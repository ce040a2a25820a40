"""Table of all trials."""

from __future__ import annotations

from trials.backend import CLOCK_WORDS, Status
from tuner.answers.fewer_hosts import OnFewerHosts
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, concatenate, empty_section, section, table, tag
from tuner.report.sections.accuracy import relative_error
from tuner.report.words import format_value, gibibytes, in_short, percent, plural, predicted_seconds, seconds
from tuner.storage.record import TrialRecord

TITLE = "Trials"

_PREDICTED = ("predicted", "error", "memory", "predicted")
_HARMLESS = (Status.OK, Status.PRUNED, Status.CANCELLED)


def trials_section(data: ReportData) -> Html:
    """Render number, dimensions, status, step time, prediction and memory of each trial."""
    if not data.records and not data.fewer_hosts:
        return empty_section("trials", TITLE, "No trial has been started yet.")
    head: list[Content] = ["trial", *data.dimensions, "status", _step_head(data), *_PREDICTED]
    rows = [_row(data, record) for record in data.records]
    first = 1 + len(data.dimensions)
    numeric = frozenset(range(first)) | frozenset(range(first + 1, first + 6))
    return section("trials", TITLE, table(head, rows, numeric=numeric), *map(_on_fewer_hosts, data.fewer_hosts))


def _on_fewer_hosts(phase: OnFewerHosts) -> Html:
    """Render the trials that ran while hosts were lost: number, configuration, status and step time."""
    rows: list[list[Content]] = [
        [str(record.number), in_short(record.params), _status(record), seconds(record.step_time_s)]
        for record in phase.records
    ]
    return concatenate(
        tag("h3", f"On {phase.hosts_in_words}"),
        tag("p", f"While the other hosts were lost: study {phase.study_name} in the same storage."),
        table(["trial", "configuration", "status", "step"], rows, numeric=frozenset({0, 3})),
    )


def _step_head(data: ReportData) -> str:
    clock = data.request.trials.backend.clock
    return "step" if clock == "wall" else f"step ({CLOCK_WORDS[clock]})"


def _row(data: ReportData, record: TrialRecord) -> list[Content]:
    observation = None if record.is_proxy else record.observation
    role = (tag("span", "best", class_="badge best") if record is data.best else Html("")) + (
        tag("span", data.reference.role, class_="badge current")
        if data.reference is not None and record.params == data.reference.values
        else Html("")
    )
    return [
        concatenate(Html(role), str(record.number)),
        *(format_value(record.params[name]) if name in record.params else None for name in data.dimensions),
        _status(record),
        seconds(record.step_time_s),
        predicted_seconds(record.predicted_s),
        percent(relative_error(record), signed=True),
        gibibytes(observation.peak_memory_bytes if observation else None),
        gibibytes(record.prediction.get("peak_memory_bytes")),
    ]


def _status(record: TrialRecord) -> Html:
    """Render the status of a trial, with its reason and the end of its log if there are any."""
    if record.status is None:
        return tag("span", "running", class_="status")
    kind = "status good" if record.status in _HARMLESS else "status bad"
    observation = record.observation
    reason = observation.reason if observation else ""
    log = observation.log_tail if observation else ""
    return concatenate(
        tag("span", record.status.in_words, class_=kind),
        tag("div", _proxy_words(record), class_="note") if record.is_proxy else None,
        tag("div", reason, class_="note") if reason else None,
        tag("details", tag("summary", "log"), tag("pre", log)) if log else None,
    )


def _proxy_words(record: TrialRecord) -> str:
    """Describe the proxy job that ran for the candidate, and its measured step."""
    if record.proxy is None:
        return ""
    reduction, observation = record.proxy.reduction, record.observation
    measured = observation.step_time_s if observation else None
    return (
        f"proxy: {in_short(record.proxy.config.values())}, {plural(reduction.layers, 'layer')}, "
        f"{plural(reduction.global_batch_size, 'sequence')} on {plural(record.proxy.config.num_devices, 'device')}"
        + (f", step {seconds(measured)}" if measured else "")
    )
