"""Trials in TensorBoard: one run for each, with its configuration in the tab of hyperparameters.

The package `tensorboard` alone writes the files. Optuna's callback needs TensorFlow besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.run.trackers.contract import AbstractTracker, Tracked, needed


class TensorBoardTracker(AbstractTracker):
    """Writer of event files.

    Args:
        folder: Folder for the runs of all studies, which `tensorboard --logdir` shows.
    """

    def __init__(self, folder: Path) -> None:
        with needed("tensorboard"):
            from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 # an extra
            from tensorboard.plugins.hparams import metadata, plugin_data_pb2, summary_v2  # noqa: PLC0415
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._metadata, self._data, self._hparams = metadata, plugin_data_pb2, summary_v2
        self._writer: Any = EventFileWriter

    def log(self, trial: Tracked) -> None:
        """Write the run `STUDY/trial-N`."""
        shown = {name: value if isinstance(value, int | float) else str(value) for name, value in trial.params.items()}
        began = self._hparams.hparams_pb(
            shown | {"status": trial.status}, trial_id=str(trial.number), start_time_secs=trial.began_s
        )
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in trial.metrics.items()]
        writer = self._writer(str(self._folder / trial.study / f"trial-{trial.number}"))
        for summary in (began, self._summary(value=values), self._end_of(trial)):
            writer.add_event(self._event(wall_time=trial.ended_s, step=trial.number, summary=summary))
        writer.close()

    def _end_of(self, trial: Tracked) -> Any:
        """Return the summary that ends a run in the tab of hyperparameters."""
        ended = self._data.SessionEndInfo(
            status="STATUS_SUCCESS" if trial.is_ok else "STATUS_FAILURE", end_time_secs=trial.ended_s
        )
        value = self._summary.Value(
            tag=self._metadata.SESSION_END_INFO_TAG,
            metadata=self._metadata.create_summary_metadata(self._data.HParamsPluginData(session_end_info=ended)),
            tensor=self._metadata.NULL_TENSOR,
        )
        return self._summary(value=[value])
