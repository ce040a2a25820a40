"""When a study stops, in words that a report can print."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why the search ended; the value is the word in JSON, `sentence` the words for people."""

    CONFIDENT = "confident"
    TRIALS = "max_trials"
    FULL_TRIALS = "full_trials"
    SECONDS = "max_seconds"
    DEVICE_HOURS = "budget_device_hours"
    EXHAUSTED = "exhausted"
    INTERRUPTED = "interrupted"

    @property
    def sentence(self) -> str:
        """What happened and what it means."""
        return _SENTENCES[self]


_SENTENCES = {
    StopReason.CONFIDENT: "nothing faster is likely to be left",
    StopReason.TRIALS: "the budget of trials is spent",
    StopReason.FULL_TRIALS: "the trials at full size that follow the proxies are spent",
    StopReason.SECONDS: "the budget of time is spent",
    StopReason.DEVICE_HOURS: "the budget of device-hours is spent",
    StopReason.EXHAUSTED: "every candidate has been tried",
    StopReason.INTERRUPTED: "interrupted; the same command continues",
}
