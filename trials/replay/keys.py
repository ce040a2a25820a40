"""Keys of `trial: {backend: replay}`, and the backend that they build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from costmodels.calibration.measured_runs import MeasuredGroup, read_measured_group
from trials.replay.backend import ReplayBackend
from trials.trial_keys import AbstractTrialKeys, ProxyOptions, StudyParts


class ReplayKeys(AbstractTrialKeys):
    """`trial:` with `backend: replay`."""

    # the rows themselves give a trial its meaning, and not the names of their files
    WITHOUT_MEANING: ClassVar[frozenset[str]] = AbstractTrialKeys.WITHOUT_MEANING | {"measured"}

    backend: Literal["replay"]
    """Measured rows take the place of trials."""

    measured: Annotated[list[str], Field(min_length=1)]
    """CSV files as in [configs/measured](../configs/measured/README.md)."""

    where: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Columns and values that select the rows of one job on one cluster."""

    seconds_per_trial: Annotated[float, Field(ge=0)] = 0.0
    """Wall time that each trial pretends to take [s], spread over its steps."""

    proxy: ProxyOptions | None = None
    """Refused: there are no rows of smaller jobs."""

    def build_model(self, study: StudyParts) -> ReplayBackend:
        """Build the backend that replays the study's measured runs."""
        assert study.subject.measured is not None, "a replay has measured rows"
        return ReplayBackend(group=study.subject.measured, seconds_per_trial=self.seconds_per_trial)

    def measured_runs(self, base_dir: Path) -> MeasuredGroup:
        """Read the rows that `measured` and `where` choose.

        Raises:
            ConfigError: A row is malformed, or the rows belong to several jobs.
        """
        return read_measured_group(self.measured, self.where, base_dir)

    def files_read(self) -> Iterator[tuple[str, str]]:
        """Yield the CSV files."""
        for number, name in enumerate(self.measured):
            yield f"trial.measured.{number}", name
