"""Mailbox of the executor: the actor that holds news of running trials.

Steps travel through a mailbox, an actor that needs no CPU. Workers put steps in without waiting, and the driver asks
for them from time to time, so that steps outlive their worker. The mailbox has one thread and repeats no call, because
only then does Ray keep the order of a worker's calls. It numbers the steps and keeps them until the driver has read
them, so that an answer may be late or lost. Streaming generators would need no such process, but Ray's client has none.

This file imports nothing of ours, so that the process of the mailbox is small and starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """News that a trial that waited in a queue has got its devices, with its number and attempt (from 0)."""

    trial_number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step on its way to the driver, with its trial's number and attempt (from 0)."""

    trial_number: int
    attempt: int
    step_time_s: float
    measured_after_s: float


News = Start | Step
"""News of a running trial."""


class Mailbox:
    """Actor that holds measured steps and other news until the driver has read them."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.num_dropped: int | None = None

    def put(self, news: News) -> None:
        """Store a step, or the start of a trial."""
        self.news.append(news)

    def read(self, num_read: int) -> tuple[int, list[News]]:
        """Return the number of the first news that are still held, and all from there, in order of arrival.

        The driver has the first `num_read` already; they may be dropped.
        """
        if self.num_dropped is None:  # the first call, or the first after this process was restarted
            self.num_dropped = num_read
        del self.news[: max(num_read - self.num_dropped, 0)]
        self.num_dropped = max(num_read, self.num_dropped)
        return self.num_dropped, self.news
