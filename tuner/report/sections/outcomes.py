"""Outcomes of the trials, and what each outcome says about its candidate."""

from __future__ import annotations

from collections import Counter

from trials.backend import Status
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, table

_WORDS = {
    Status.OK: ("completed", "its step time corrects the predictions"),
    Status.PRUNED: ("stopped early", "clearly slower than the best; not tried again"),
    Status.TIMEOUT: ("time limit", "cut off; not tried again under the same limit"),
    Status.OUT_OF_MEMORY: ("out of memory", "it does not fit; not tried again"),
    Status.CRASHED: ("crashed", "the program failed; not tried again"),
    Status.INCIDENT: ("incident", "a machine or the queue failed; no conclusion about the configuration"),
    Status.CANCELLED: ("cancelled", "the study ended; no conclusion about the configuration"),
    None: ("running", "not ended yet"),
}

_PROXY_WORDS: dict[Status | None, str] = {
    Status.OK: "the errors of the proxy job's step correct the predictions of all candidates",
    Status.OUT_OF_MEMORY: "the proxy job does not fit; its candidate still may",
}


def outcomes_table(data: ReportData) -> Html:
    """Render the number of trials by outcome in a fixed order; empty while all have the same outcome."""
    counts = Counter(record.status for record in data.records if not record.is_proxy)
    rows: list[list[Content]] = [
        [outcome, f"{counts[status]:,}", meaning] for status, (outcome, meaning) in _WORDS.items() if counts[status]
    ]
    by_proxy = Counter(record.status for record in data.records if record.is_proxy)
    rows += [
        [f"proxy: {outcome}", f"{by_proxy[status]:,}", _PROXY_WORDS.get(status, meaning)]
        for status, (outcome, meaning) in _WORDS.items()
        if by_proxy[status]
    ]
    if len(rows) < 2:
        return Html("")
    return table(["outcome", "trials", "meaning"], rows, numeric=frozenset({1}))
