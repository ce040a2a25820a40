"""Trials in MLflow: one run for each, in the experiment of the study's name."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from tuner.run.trackers.contract import AbstractTracker, Tracked, needed

URI = "MLFLOW_TRACKING_URI"
"""Environment variable of MLflow that names the server or database of runs."""


class MlflowTracker(AbstractTracker):
    """Client of MLflow.

    Args:
        folder: Path of the runs without its ending, where the environment names none.
    """

    def __init__(self, folder: Path) -> None:
        with needed("mlflow"):
            from mlflow import MlflowClient  # noqa: PLC0415 # an extra
            from mlflow.entities import Metric, Param  # noqa: PLC0415

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # not each table that it makes, amid our lines
        self._metric: Any = Metric
        self._param: Any = Param
        self._client: Any = MlflowClient(os.environ.get(URI) or f"sqlite:///{folder}.db")

    def log(self, trial: Tracked) -> None:
        """Write a run with the trial's configuration, its metrics, and its status as a tag."""
        ended_ms = round(trial.ended_s * 1000)
        run = self._client.create_run(
            self._experiment(trial.study),
            start_time=round(trial.began_s * 1000),
            run_name=f"trial-{trial.number}",
            tags={"trial": str(trial.number), "status": trial.status, "study": trial.study},
        )
        metrics = [self._metric(name, value, ended_ms, trial.number) for name, value in trial.metrics.items()]
        params = [self._param(name, str(value)) for name, value in trial.params.items()]
        self._client.log_batch(run.info.run_id, metrics=metrics, params=params)
        self._client.set_terminated(run.info.run_id, "FINISHED" if trial.is_ok else "FAILED", ended_ms)

    def _experiment(self, study: str) -> str:
        """Return the identifier of a study's experiment, which is made if it is missing."""
        found = self._client.get_experiment_by_name(study)
        return str(found.experiment_id if found is not None else self._client.create_experiment(study))
