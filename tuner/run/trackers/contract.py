"""Contract of a tracker: what it is told of a trial, and where it keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from costmodels.job.parallel_config import Value
from hardware.io.errors import ConfigError
from trials.backend import Status
from tuner.storage.record import TrialRecord

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    """Trial that has ended, as trackers show it.

    Attributes:
        study: Name of the study.
        number: Number of the trial.
        params: Dimensions of its configuration.
        status: Outcome of the trial.
        metrics: `step_time_s` [s] of a trial that completed, and `peak_memory_gib` [GiB] if it is known.
        began_s: Time at which it was asked for, since the epoch [s].
        ended_s: Time at which it ended, likewise [s].
    """

    study: str
    number: int
    params: Mapping[str, Value]
    status: str
    metrics: Mapping[str, float]
    began_s: float
    ended_s: float

    @property
    def is_ok(self) -> bool:
        """Whether it measured its steps."""
        return self.status == Status.OK

    @classmethod
    def of(cls, record: TrialRecord, study: str) -> Tracked:
        """Return what a record says."""
        seen = record.observation
        began = record.started_at or datetime.now().astimezone()
        peak_bytes = seen.peak_memory_bytes if seen else None
        return cls(
            study=study,
            number=record.number,
            params=record.params,
            status=record.status.value if record.status else "unknown",
            metrics=({} if record.step_time_s is None else {"step_time_s": record.step_time_s})
            | ({} if peak_bytes is None else {"peak_memory_gib": peak_bytes / GIB}),
            began_s=began.timestamp(),
            ended_s=(record.ended_at or began).timestamp(),
        )


class AbstractTracker(ABC):
    """Place where ended trials are shown. One thread uses it."""

    @abstractmethod
    def log(self, trial: Tracked) -> None:
        """Keep a trial; any exception is told once, and ends no study."""

    def close(self) -> None:  # noqa: B027 # most hold nothing open
        """Let go of what is held open."""


@contextmanager
def needed(name: str) -> Iterator[None]:
    """Explain an import that fails, because the extra of a tracker is not installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"needs {error.name or error}, which is not installed",
            key="search.callbacks",
            value=name,
            nearest=f"pip install 'meshtune[{name}]'",
        ) from None
