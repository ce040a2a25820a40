"""Predictions for Python users: of one configuration, and of the fastest ones, as the commands print them in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig, Value, parse_config
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.surrogates.uncertainty import SIGMA, WIDE, half_width, likely_range
from hardware.arrays import IntArray
from hardware.io.errors import ConfigError
from tuner.answers.basis import Basis, basis_of
from tuner.answers.rank_rows import rank_rows
from tuner.answers.results import Prediction, RankedCandidate
from tuner.forecast.candidates import predict_with_errors, speed_of
from tuner.forecast.planned_candidates import prepare
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import OnProgress, Ranked, ignore_progress, predicted_ranking, without
from tuner.forecast.sizes import PREDICTED, Judge, Judged
from tuner.forecast.stages import stages_json
from tuner.space.enumeration import launchable
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem


def predict(study: StudyRequest | Path | str, config: ParallelConfig | Mapping[str, Value] | str) -> Prediction:
    """Return step time, memory and stages of one configuration, as `meshtune predict --json` prints them.

    They are those that the study's trials taught, once some have ended, and predicted before.

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
    stored = StoredStudies(loaded.storage)
    problem = prepare(loaded, stored, chosen).problem
    found = predict_taught(problem, chosen, basis_of(loaded, stored)) | stages_json(problem, chosen)
    return cast("Prediction", found)


def predict_taught(
    problem: Problem, chosen: ParallelConfig, basis: Basis, *, is_elsewhere: bool = False
) -> dict[str, Any]:
    """Return a prediction with its error, by the trials as far as they say something of it.

    Parts of the step and of the memory stay those of the cost model, whose whole answer is under `predicted`.

    Args:
        problem: Problem in whose setting the configuration runs.
        chosen: Configuration.
        basis: What the answer rests on.
        is_elsewhere: Whether the setting is another one than the study's own, as while links are slow.
    """
    predicted = predict_with_errors(problem, chosen)
    setting = problem.setting if is_elsewhere else None
    found = None if basis.taught is None else basis.taught.step_of(chosen, setting)
    if found is None:
        return predicted | {"source": PREDICTED, "outcome": None, "predicted": None} | basis.as_json()
    of_cost_model = {name: value for name, value in predicted.items() if name in _TAUGHT}
    return (
        predicted
        | {
            "step_time_s": found.step_time_s,
            **speed_of(problem, found.step_time_s),
            "step_time_log_error": found.range.log_error,
            **found.range.as_json(),
            "peak_memory_bytes": int(found.peak_bytes),
            "peak_memory_log_error": half_width(None, SIGMA) * found.peak_log_error,
            "peak_memory_range_bytes": list(
                likely_range(found.peak_bytes, half_width(None, WIDE) * found.peak_log_error)
            ),
            "fits": found.fits,
            "fit_probability": found.fit_probability,
            "source": found.source,
            "outcome": found.outcome or None,
            "predicted": of_cost_model,
        }
        | basis.as_json()
    )


_TAUGHT = (
    "step_time_s",
    "step_time_log_error",
    "step_time_range_s",
    "peak_memory_bytes",
    "peak_memory_log_error",
    "peak_memory_range_bytes",
    "fits",
    "fit_probability",
    "mfu",
    "tokens_per_s_per_device",
)
"""Keys of a prediction that trials answer in place of the cost model."""


def rank(study: StudyRequest | Path | str, *, top: int | None = 10) -> list[RankedCandidate]:
    """Return the candidates of a study in the order of their step times, the fastest first.

    Step times are predicted, or those that the study's trials taught once some have ended.

    Args:
        study: Study, or path of its file.
        top: Number of candidates to return; None for all.

    Returns:
        For each candidate its dimensions and figures, as `meshtune rank --json` prints them.

    Raises:
        ConfigError: The study is wrong.
    """
    loaded = _load(study)
    stored = StoredStudies(loaded.storage)
    prepared = prepare(loaded, stored)
    basis = basis_of(loaded, stored, prepared)
    ranked = rank_candidates(prepared, basis)
    return cast("list[RankedCandidate]", rank_rows(prepared, basis, ranked, range(len(ranked.order))[:top]))


def rank_candidates(
    prepared: Prepared, basis: Basis, *, on_progress: OnProgress = ignore_progress, heeds_rehearsals: bool = True
) -> Ranked:
    """Rank the candidates of a study by what the answer rests on.

    Candidates that rehearsals refused come last, and so do those that are too large in rehearsal.

    Args:
        prepared: Study.
        basis: What its trials taught, if they did.
        on_progress: Function that is told what takes seconds.
        heeds_rehearsals: Whether they come last; otherwise rehearsals change nothing.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    ranked = basis.taught.ranked if basis.taught else predicted_ranking(prepared, on_progress=on_progress)
    return _without_refused(prepared, ranked) if heeds_rehearsals else ranked


def judge_of(prepared: Prepared, basis: Basis) -> Judge:
    """Return the judge of configurations in other settings by the trials of a study, and of its own candidates.

    Args:
        prepared: Study.
        basis: What its trials taught, if they did.
    """

    def judge(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate) -> Judged | None:
        found = basis.taught.judge(setting, grid, memory) if basis.taught else None
        if found is None or setting.cluster != prepared.problem.cluster:
            return found
        refused = _refused(prepared, grid, found.is_measured)
        return replace(found, fits=found.fits & ~np.isin(np.arange(len(grid)), refused))

    return judge


def _without_refused(prepared: Prepared, ranked: Ranked) -> Ranked:
    """Return the ranking with candidates last that rehearsals rule out, unless a trial of them completed."""
    refused = _refused(prepared, prepared.candidates.space.grid, ranked.is_measured)
    return without(ranked, refused) if len(refused) else ranked


def _refused(prepared: Prepared, grid: ConfigGrid, is_measured: NDArray[np.bool_]) -> IntArray:
    """Return the positions of candidates that rehearsals rule out, and of which no trial completed."""
    if not prepared.request.storage.may_exist:
        return np.zeros(0, dtype=np.int64)
    from tuner.answers.rehearsals import told_rehearsals  # noqa: PLC0415 # it loads the storages

    places: dict[tuple[Any, ...], int] = {tuple(key): at for key, at in grid.positions().items()}
    found = [
        places.get(tuple(one.config.get(name) for name in grid.dimensions))
        for one in told_rehearsals(prepared.request)
        if one.in_words
    ]
    return np.array([at for at in found if at is not None and not is_measured[at]], dtype=np.int64)


def _load(study: StudyRequest | Path | str) -> StudyRequest:
    return study if isinstance(study, StudyRequest) else load_study(study)
