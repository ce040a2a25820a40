"""Predictions for Python users: of one configuration, and of the fastest ones, as the commands print them in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ParallelConfig, Value, parse_config
from hardware.io.errors import ConfigError
from tuner.forecast.candidates import predict_with_errors
from tuner.forecast.planned_candidates import prepare
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import OnProgress, Ranked, ignore_progress, predicted_ranking, row_of, without
from tuner.forecast.stages import stages_json
from tuner.space.enumeration import launchable
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest


def predict(study: StudyRequest | Path | str, config: ParallelConfig | Mapping[str, Value] | str) -> dict[str, Any]:
    """Return step time, memory and stages of one configuration as predicted, as `meshtune predict --json` prints them.

    Args:
        study: Study, or path of its file.
        config: Configuration, in the searched space or not: `"pp=4,tp=8,dp=2"`, a mapping of such values, or a
            ParallelConfig. Left-out dimensions are 1, or fixed by the study.

    Raises:
        ConfigError: The study is wrong, or the configuration cannot be launched on its cluster.
    """
    loaded = _load(study)
    if isinstance(config, str):
        chosen = parse_config(config, loaded.problem.subject.defaults, option="config")
    elif isinstance(config, ParallelConfig):
        chosen = config
    else:
        chosen = ParallelConfig(**(loaded.problem.subject.defaults | dict(config)))  # type: ignore[arg-type] # checked there
    if not launchable(loaded.problem.setting, chosen):
        raise ConfigError(
            f"cannot be launched on the {loaded.problem.cluster.num_devices} devices of the study",
            file=loaded.file,
            key="config",
            value=str(chosen),
            nearest="rank() lists configurations that can",
        )
    problem = prepare(loaded, StoredStudies(loaded.storage), chosen).problem
    return predict_with_errors(problem, chosen) | stages_json(problem, chosen)


def rank(study: StudyRequest | Path | str, *, top: int | None = 10) -> list[dict[str, Any]]:
    """Return the candidates of a study in the order of their step times, the fastest first.

    Step times are predicted, or those that the study's trials taught once some have ended.

    Args:
        study: Study, or path of its file.
        top: Number of candidates to return; None for all.

    Returns:
        For each candidate its dimensions, step_time_s [s], peak_memory_bytes, fits, tokens_per_s_per_device and source:
        `measured` or `synthetic`, `learned` from other trials, `simulated` or `predicted`.

    Raises:
        ConfigError: The study is wrong.
    """
    loaded = _load(study)
    stored = StoredStudies(loaded.storage)
    prepared = prepare(loaded, stored)
    ranked = rank_candidates(prepared, stored)
    return [row_of(prepared, ranked, place) for place in range(len(ranked.order))[:top]]


def rank_candidates(
    prepared: Prepared,
    stored: StoredStudies,
    *,
    on_progress: OnProgress = ignore_progress,
    heeds_rehearsals: bool = True,
) -> Ranked:
    """Rank the candidates of a study, by what its trials taught if its storage holds any that have ended.

    Candidates that rehearsals refused come last, and so do those that are too large in rehearsal.

    Args:
        prepared: Study.
        stored: Studies in its storage.
        on_progress: Function that is told what takes seconds.
        heeds_rehearsals: Whether they come last; otherwise rehearsals change nothing.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    ranked = _ranked(prepared, stored, on_progress)
    return _without_refused(prepared, ranked) if heeds_rehearsals else ranked


def _without_refused(prepared: Prepared, ranked: Ranked) -> Ranked:
    """Return the ranking with candidates last that rehearsals rule out, unless a trial of them completed."""
    if not prepared.request.storage.may_exist:
        return ranked
    from tuner.answers.rehearsals import told_rehearsals  # noqa: PLC0415 # it loads the storages

    grid = prepared.candidates.space.grid
    places: dict[tuple[Any, ...], int] = {tuple(key): at for key, at in grid.positions().items()}
    found = [
        places.get(tuple(one.config.get(name) for name in grid.dimensions))
        for one in told_rehearsals(prepared.request)
        if one.in_words
    ]
    positions = np.array([at for at in found if at is not None and not ranked.is_measured[at]], dtype=np.int64)
    return without(ranked, positions) if len(positions) else ranked


def _ranked(prepared: Prepared, stored: StoredStudies, on_progress: OnProgress) -> Ranked:
    study = stored.look(prepared.request.name)
    if study is not None:
        from tuner.answers.learned_ranking import learned_ranking  # noqa: PLC0415 # it loads Optuna

        learned = learned_ranking(prepared, study, on_progress=on_progress)
        if learned is not None:
            return learned
    return predicted_ranking(prepared, on_progress=on_progress)


def _load(study: StudyRequest | Path | str) -> StudyRequest:
    return study if isinstance(study, StudyRequest) else load_study(study)
