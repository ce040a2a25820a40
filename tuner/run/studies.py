"""Studies in their storage: open one as new or as it was left, with the sampler that its options ask for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna import Study
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import NopPruner
from optuna.storages import BaseStorage

from hardware.io.errors import ConfigError, quote_value
from tuner.answers.reference import reference_among
from tuner.forecast.objective import objective_of
from tuner.forecast.planned_candidates import prepare
from tuner.forecast.prepared import Prepared
from tuner.forecast.searched_knobs import searched_knobs
from tuner.run.driver import DRIVER, is_held
from tuner.run.memory_limit import with_room
from tuner.search.acquisition import ACQUISITION_FUNCTIONS
from tuner.search.observations import excused_trials
from tuner.search.prior import OnProgress, ignore_progress
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.pruning import ClearlySlowerPruner
from tuner.search.sampler import ThompsonSampler
from tuner.storage.history import Past
from tuner.storage.opening import foreign_values, open_store
from tuner.storage.record import MEANING, ORIGIN
from tuner.storage.stored_studies import StoredStudies
from tuner.storage.stored_values import check_values
from tuner.study_file.meaning import first_difference
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem


def prepared_of(study: StudyRequest | Prepared) -> Prepared:
    """Return the study with its layers planned as a run plans them, if they are not yet."""
    return study if isinstance(study, Prepared) else prepare(study, StoredStudies(study.storage), runs=True)


def make_sampler(
    study: StudyRequest | Prepared,
    past: Past | None = None,
    *,
    stop_when_confident: bool = False,
    on_note: OnProgress = ignore_progress,
) -> ThompsonSampler:
    """Return the sampler that a study's options ask for, with what its history teaches.

    Args:
        study: Study; its layers are planned here if they are not yet.
        past: History of the study.
        stop_when_confident: Whether the sampler ends `study.optimize`; the driver of a study ends its own loop.
        on_note: Function that is told what takes seconds.
    """
    prepared = prepared_of(study)
    request, problem, candidates = prepared.request, prepared.problem, prepared.candidates
    grid = candidates.space.grid
    reference = reference_among(prepared)
    return ThompsonSampler(
        grid,
        with_room(problem.subject.prior(grid, past, on_progress=on_note), request.economics.limits.free_memory),
        knobs=searched_knobs(problem, candidates),
        acquisition=ACQUISITION_FUNCTIONS[request.search.acquisition],
        draws=request.search.draws,
        confidence=request.search.confidence,
        tolerance=request.search.tolerance,
        seed=request.search.seed,
        first=None if reference is None else reference.config,
        first_in_use=problem.current is not None,
        proxies=None
        if request.trials.proxy is None
        else ProxyPlan(
            options=request.trials.proxy,
            setting=problem.setting,
            space=problem.options,
            grid=grid,
            max_trials=request.search.max_trials,
            confidence=request.search.confidence,
        ),
        repeats=request.search.repeats or 0,
        stop_when_confident=stop_when_confident,
        objective=objective_of(prepared),
    )


def make_pruner(problem: Problem) -> ClearlySlowerPruner:
    """Return the pruner that stops trials early; the current configuration is measured in full."""
    return ClearlySlowerPruner(current=problem.current.values(problem.dimensions) if problem.current else None)


def open_study(prepared: Prepared, sampler: ThompsonSampler, storage: BaseStorage | None = None) -> Study:
    """Open the study in its storage, new or as it was left; open the storage too if it is not given.

    Raises:
        ConfigError: The trials of the stored study mean something else than the study file now says.
    """
    request = prepared.request
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with foreign_values(request.storage):
        study = optuna.create_study(
            study_name=request.name,
            storage=open_store(request.storage).storage if storage is None else storage,
            sampler=sampler,
            pruner=make_pruner(prepared.problem) if request.search.prune else NopPruner(),
            directions=["minimize"] * len(request.problem.objective),
            load_if_exists=True,
        )
        check_values(study)
    stored, trials = study.user_attrs.get(MEANING), study.get_trials(deepcopy=False)
    excused = {trial.number for trial in trials} <= excused_trials(trials)
    if stored is not None and trials and excused and not is_running(study):
        # nothing was measured, and the command is what has to be mended
        check_meaning(request, study, but="trial")
        study.set_user_attr(ORIGIN, request.trials.backend.origin)
        study.set_user_attr(MEANING, json.loads(json.dumps(request.meaning)))
    elif stored is None and not trials:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names(sampler.metric_names)  # what the dashboard writes beside its axes
        study.set_user_attr(ORIGIN, request.trials.backend.origin)
        # last: with it the study is complete
        study.set_user_attr(MEANING, json.loads(json.dumps(request.meaning)))
    else:
        check_meaning(request, study)
        if stored is not None and is_by_hand_so_far(stored) and "planner" in request.meaning and not is_running(study):
            study.set_user_attr(MEANING, json.loads(json.dumps(request.meaning)))
    return study


def check_meaning(request: StudyRequest, study: Study, *, but: str = "") -> None:
    """Check that the stored trials mean what the study file says, whatever its section `but` says.

    Raises:
        ConfigError: They mean something else.
    """
    stored, wanted = study.user_attrs.get(MEANING) or {}, json.loads(json.dumps(request.meaning))
    before, now = ({key: meaning[key] for key in meaning if key != but} for meaning in (stored, wanted))
    if is_by_hand_so_far(stored):
        now.pop("planner", None)  # its trials have the plan by hand, which stays a candidate beside others
    difference = first_difference(before, now)
    if difference is not None:
        key, old, new = difference
        nearest = "give the study another name, or change the key back"
        if key == "space.knobs" and isinstance(old, list) and old:
            # what is recommended may change with the cost model
            nearest += f"; its knobs were [{', '.join(str(knob['name']) for knob in old)}]"
        raise ConfigError(
            f"the stored study {request.name!r} was measured with {quote_value(old)}; its trials would no longer "
            "mean the same",
            file=request.file,
            key=key,
            value=new,
            nearest=nearest,
        )


def is_by_hand_so_far(meaning: Mapping[str, Any]) -> bool:
    """Return whether all trials of a study with this meaning ran the plan by hand, as before there was another."""
    return "planner" not in meaning


def stored_study(request: StudyRequest, stored: StoredStudies | None = None) -> Study:
    """Return the study that the storage holds, for reading.

    Args:
        request: Request of the study.
        stored: Studies in its storage, where the caller looks up others too.

    Raises:
        ConfigError: The storage holds none yet.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = (stored or StoredStudies(request.storage)).find(request.name)
    if study is None:
        raise ConfigError(
            "has no trials in its storage yet",
            file=request.file,
            key="name",
            value=request.name,
            nearest=f"start it with `meshtune run {request.file}`",
        )
    return study


def is_running(study: Study) -> bool:
    """Return whether some process is driving the study."""
    return is_driven(study.user_attrs)


def is_driven(attributes: Mapping[str, Any]) -> bool:
    """Return whether some process is driving the study with these attributes, which take a while to read."""
    held = attributes.get(DRIVER)
    return held is not None and is_held(held)
