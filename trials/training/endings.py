"""How the ranks of a training trial ended, and what follows from it for the trial.

A rank that fails, dies or hangs takes the others of its trial with it: they soon fail too, because a peer is missing.
So the cause is found from all ranks together. A signal that killed a rank comes first, then a lack of memory, then the
first error that is not about a lost connection, then a rank that ended without a message. A rank that the C library or
C++ has ended for lack of memory could send nothing; it is recognised by its output.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trials.backend import Status
from trials.ranks.messages import Exit
from trials.ranks.out_of_memory import speaks_of_memory
from trials.training.messages import Begun, Failed

GRACE_S = 3.0
"""Time that the other ranks have to report when one has failed [s]."""


@dataclass(kw_only=True, slots=True)
class Endings:
    """Ends of the ranks so far.

    Attributes:
        num_ranks: Number of ranks of the trial.
        lost_peer: Words in the errors of ranks that have only lost another one.
        begun: Ranks that told what memory they began with.
        finished: Peak memory of ranks that have finished their work [bytes].
        failed: Ranks that told an error.
        killed: Ranks that a signal ended.
        exited: Ranks that ended before they finished.
    """

    num_ranks: int
    lost_peer: Sequence[str]
    begun: dict[int, Begun] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    killed: dict[int, Exit] = field(default_factory=dict)
    exited: dict[int, Exit] = field(default_factory=dict)

    def take_exit(self, event: Exit) -> None:
        """Note the end of a rank's process."""
        if event.code < 0:
            self.killed[event.rank] = event
        elif event.code > 0 or event.rank not in self.finished:
            self.exited[event.rank] = event

    @property
    def is_ending(self) -> bool:
        """Whether a rank has failed, which the others soon will too."""
        return bool(self.failed or self.killed or self.exited)

    @property
    def killed_by(self) -> str:
        """First signal that killed a rank; empty if none did."""
        return next((signal.Signals(-end.code).name for end in self.killed.values()), "")

    def outcome(self, printed: Callable[[], str], hang_limit_s: float) -> tuple[Status, str, str]:
        """Return the status, its reason in one line, and the traceback that shows it.

        Args:
            printed: Function that returns the end of what the ranks printed.
            hang_limit_s: Silence of all ranks that means a hang [s].
        """
        if len(self.finished) == self.num_ranks:
            return Status.OK, "", ""
        lack = self._lack_of_memory(printed)
        if lack:
            return Status.OUT_OF_MEMORY, *lack
        if self.killed:
            return Status.INCIDENT, f"rank {next(iter(self.killed))} was killed by {self.killed_by}", ""
        own, speechless = self._own_failures(), self._speechless()
        if speechless and not own:
            return Status.CRASHED, f"rank {speechless[0].rank} ended early with exit status {speechless[0].code}", ""
        if self.failed:
            rank, failed = next(iter((own or self.failed).items()))
            return Status.CRASHED, f"rank {rank}: {failed.reason}", failed.text
        silent = sorted(set(range(self.num_ranks)) - set(self.finished))
        return Status.INCIDENT, f"hangs: ranks {silent} sent nothing for {hang_limit_s:g} s", ""

    def peaks_bytes(self) -> list[int]:
        """Return the memory peaks of all ranks [bytes]: reported ones, or those of processes that ended without."""
        told = self.finished | {
            rank: failed.peak_bytes for rank, failed in self.failed.items() if failed.peak_bytes is not None
        }
        # a rank that ended without a message: the peak of its process, less what it held before it trained
        ended = {
            rank: max(end.peak_bytes - self.begun[rank].resident_bytes, 0)
            for rank, end in (self.killed | self.exited).items()
            if rank in self.begun
        }
        return list((ended | told).values())

    def _lack_of_memory(self, printed: Callable[[], str]) -> tuple[str, str] | None:
        """Return a lack of memory in one line, and its traceback; None if no rank lacks memory.

        It is None, too, if a signal from outside has killed a rank. SIGABRT is not from outside: a process that lacks
        memory may abort.
        """
        if any(-end.code != signal.SIGABRT for end in self.killed.values()):
            return None
        speechless = self._speechless()
        lines = [line.strip() for line in printed().splitlines() if speaks_of_memory(line)] if speechless else []
        if lines:
            return f"rank {speechless[0].rank}: {lines[0][:500]}", ""
        if self.killed:
            return None
        for rank, failed in self.failed.items():
            if failed.is_out_of_memory:
                return f"rank {rank}: {failed.reason}", failed.text
        for rank, failed in self._own_failures().items():
            if failed.is_memory_used_up:
                return f"rank {rank} has used up its memory: {failed.reason}", failed.text
        return None

    def _speechless(self) -> list[Exit]:
        """Return the exits of the ranks that have sent no reason."""
        return [end for end in (self.killed | self.exited).values() if end.rank not in self.failed]

    def _own_failures(self) -> Mapping[int, Failed]:
        """Return the failures that are not due to a lost peer."""
        return {
            rank: failed
            for rank, failed in self.failed.items()
            if not any(sign in failed.text for sign in self.lost_peer)
        }
