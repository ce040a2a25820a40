"""Trackers beside a run: they are told of ended trials by a thread of their own, so that no server delays a trial."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hardware.io.errors import ConfigError
from trials.submitted_job import check_outlives_job
from tuner.run.progress import Progress
from tuner.run.trackers.contract import AbstractTracker, Tracked
from tuner.run.trackers.in_mlflow import MlflowTracker
from tuner.run.trackers.in_tensorboard import TensorBoardTracker
from tuner.run.trackers.in_wandb import WandbTracker
from tuner.study_file.request import StudyRequest

CLOSE_LIMIT_S = 60.0
"""Time that trackers have at the end of a run to take what they were told last [s]."""

OnProgress = Callable[[Progress], None]


TRACKERS: dict[str, Callable[[Path], AbstractTracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
"""Function that opens each tracker; it is given the folder of its files, which is beside the study file."""


@contextmanager
def tracked(request: StudyRequest, on_progress: OnProgress) -> Iterator[OnProgress]:
    """Open the trackers of a study, and give the function that tells them, too, of the progress.

    Raises:
        ConfigError: A tracker cannot be opened.
    """
    if not request.search.callbacks:
        yield on_progress
        return
    trackers: dict[str, AbstractTracker] = {}
    for name in request.search.callbacks:
        folder = Path(request.file).resolve().parent / name
        check_outlives_job(folder, key="search.callbacks", value=name, nearest="a study file outside of it")
        trackers[name] = _opened(name, folder)
    followers = _Followers(trackers)

    def tell(progress: Progress) -> None:
        on_progress(progress)
        for record in progress.ended:
            followers.put(Tracked.of(record, request.name))
        for note in followers.notes():
            on_progress(replace(progress, note=note, ended=(), opening=None, chosen=None))

    try:
        yield tell
    finally:
        followers.close()
        for note in followers.notes():
            on_progress(Progress(done=0, running=0, budget=request.search.max_trials, note=note))


def _opened(name: str, folder: Path) -> AbstractTracker:
    """Open a tracker.

    Raises:
        ConfigError: It cannot be opened.
    """
    try:
        return TRACKERS[name](folder)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 # libraries of trackers raise what they like
        raise ConfigError(f"cannot be opened: {_told(error)}", key="search.callbacks", value=name) from None


def _told(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class _Followers:
    """Thread that hands trials to trackers.

    Args:
        trackers: Trackers by name.
    """

    def __init__(self, trackers: Mapping[str, AbstractTracker]) -> None:
        self._trackers = dict(trackers)
        self._told: queue.SimpleQueue[Tracked | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)
        self._thread.start()

    def put(self, trial: Tracked) -> None:
        """Hand a trial over."""
        self._told.put(trial)

    def notes(self) -> Iterator[str]:
        """Yield what went wrong since it was asked last."""
        while not self._notes.empty():
            yield self._notes.get()

    def close(self) -> None:
        """Wait until all trials are handed over, or for too long."""
        self._told.put(None)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._notes.put(f"trackers did not take all trials within {CLOSE_LIMIT_S:g} s")

    def _follow(self) -> None:
        while (trial := self._told.get()) is not None:
            for name in [*self._trackers]:
                self._try(name, lambda tracker, trial=trial: tracker.log(trial))  # type: ignore[misc] # bound at once
        for name in [*self._trackers]:
            self._try(name, lambda tracker: tracker.close())

    def _try(self, name: str, do: Callable[[AbstractTracker], None]) -> None:
        """Do something with a tracker; one that fails is told once, and gets no more."""
        try:
            do(self._trackers[name])
        except (Exception, SystemExit) as error:  # noqa: BLE001 # a server's trouble ends no study
            del self._trackers[name]
            self._notes.put(f"{name} is told of no more trials: {_told(error)}")
