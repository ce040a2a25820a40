"""Answers of the atlas: the recommended layout of a place and the next best ones, as `meshtune rank` has them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from costmodels.job.parallel_config import Value
from costmodels.step.error_models import memory_error_of
from costmodels.surrogates.uncertainty import WIDE, likely_range, memory_half_width
from hardware.arrays import FloatArray, IntArray
from hardware.io.errors import ConfigError
from tuner.answers.basis import Basis
from tuner.answers.rank_rows import rank_rows
from tuner.atlas.places import AtlasJob, Place
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import predicted_ranking
from tuner.forecast.sizes import explain_none
from tuner.study_file.config import load_study

NUM_LAYOUTS = 4
"""Layouts of a place: the recommended one and the three fastest others."""
LIKELY = 0.8
"""Least probability of fitting in memory that the recommended layout has, if any has it."""

OnAnswer = Callable[[int, int], None]
"""Function that is told how many places are answered, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Candidate of a place with its prediction.

    Attributes:
        values: Its dimensions.
        step_time_s: Predicted step time [s].
        step_time_range_s: 95% interval of it [s].
        mfu: Model FLOP utilisation.
        tokens_per_s_per_device: Throughput of one device [tokens/s].
        peak_memory_bytes: Predicted peak memory of the fullest device [bytes].
        peak_memory_range_bytes: 95% interval of it [bytes].
        fit_probability: Probability that it fits, given the errors of predicted memory.
        shares: Share of the step that each of its bounds takes, the largest first (tuner/forecast/bounds.py).
    """

    values: Mapping[str, Value]
    step_time_s: float
    step_time_range_s: tuple[float, float]
    mfu: float
    tokens_per_s_per_device: float
    peak_memory_bytes: int
    peak_memory_range_bytes: tuple[float, float]
    fit_probability: float
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of one place.

    Attributes:
        place: Model, cluster and size.
        study: Text of the study file.
        layouts: Recommended layout, the fastest that is likely to fit, and the fastest others; empty if none fits.
        num_candidates: Number of candidates that fit the rules and the memory.
        capacity_bytes: Memory of a device [bytes]; 0 without a layout.
        reason: Reason why there is no layout; empty otherwise.
    """

    place: Place
    study: str
    layouts: tuple[Layout, ...] = ()
    num_candidates: int = 0
    capacity_bytes: int = 0
    reason: str = ""


def answer(place: Place, job: AtlasJob) -> Answer:
    """Return the answer of a place; places of which the study file is refused have the message as their reason."""
    study = place.study_text(job)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{place.name}.yaml"
        path.write_text(study, encoding="utf-8")
        try:
            request = load_study(path, storage="sqlite:///:memory:")
            prepared = Prepared(request=request, problem=request.problem)
            return _answer(place, study, prepared)
        except ConfigError as error:
            return Answer(place=place, study=study, reason=f"{error.key}: {error.rule}" if error.key else error.rule)


def _answer(place: Place, study: str, prepared: Prepared) -> Answer:
    problem, space = prepared.problem, prepared.space
    if not len(space.grid):
        return Answer(place=place, study=study, reason=explain_none(space))
    ranked = predicted_ranking(prepared)
    num_fitting = int(ranked.fits.sum())
    if not num_fitting:
        return Answer(place=place, study=study, reason=explain_none(space))
    runtime, memory = problem.setting.runtime, space.memory
    chances = memory.probability_of_fit(problem.options.memory_headroom, memory_error_of(runtime))
    at = recommended_first(chances[ranked.order[:num_fitting]])[:NUM_LAYOUTS]
    memory_error = memory_half_width(runtime, WIDE)
    untaught = Basis(place="", name=prepared.request.name)
    return Answer(
        place=place,
        study=study,
        layouts=tuple(
            _layout(space.grid.dimensions, row, memory_error)
            for row in rank_rows(prepared, untaught, ranked, at.tolist())
        ),
        num_candidates=num_fitting,
        capacity_bytes=int(memory.capacity_bytes[0]),
    )


def _layout(dimensions: Sequence[str], row: Mapping[str, Any], memory_error: float) -> Layout:
    """Return a row of a ranking as a layout, with the 95% interval of its peak by the error of its logarithm."""
    low_s, high_s = row["step_time_range_s"]
    return Layout(
        values={name: row[name] for name in dimensions},
        step_time_s=row["step_time_s"],
        step_time_range_s=(low_s, high_s),
        mfu=row["mfu"],
        tokens_per_s_per_device=row["tokens_per_s_per_device"],
        peak_memory_bytes=row["peak_memory_bytes"],
        peak_memory_range_bytes=likely_range(row["peak_memory_bytes"], memory_error),
        fit_probability=row["fit_probability"],
        shares=row["shares"],
    )


def recommended_first(chances: FloatArray) -> IntArray:
    """Return the places of a ranking with the recommended one before all others, which keep their order [n].

    It is the fastest of those that fit with a probability of LIKELY, or else the likeliest of all.

    Args:
        chances: Probability that each candidate fits, the fastest first [n].
    """
    likely = np.flatnonzero(chances >= LIKELY)
    first = int(likely[0]) if len(likely) else int(np.argmax(chances))
    return np.concatenate([[first], np.delete(np.arange(len(chances)), first)])


def answer_all(
    places: Sequence[Place], job: AtlasJob, *, processes: int, on_answer: OnAnswer = lambda _done, _count: None
) -> list[Answer]:
    """Return the answers of all places in their order, from several processes of one thread each.

    Args:
        places: Places.
        job: Job of the atlas.
        processes: Number of processes.
        on_answer: Function that is told the progress.
    """
    on_answer(0, len(places))
    found: list[Answer] = []
    with ProcessPoolExecutor(
        min(processes, max(len(places), 1)), mp_context=get_context("spawn"), initializer=_use_one_thread
    ) as pool:
        for each in pool.map(partial(answer, job=job), places, chunksize=4):
            found.append(each)
            on_answer(len(found), len(places))
    return found


def _use_one_thread() -> None:
    threadpool_limits(limits=1)
