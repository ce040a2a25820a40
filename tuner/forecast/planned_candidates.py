"""Layer plans of a study: the candidates that they add, and their effect on the cost model and on simulated trials.

Planning takes a fraction of a second for each shape of a layer, on as many processes as the machine has cores. Plans
are stored with the study, so that they are made once.

Where the plan of a shape differs from the one by hand, every candidate of the shape is there twice: by hand, and as
planned. Planners assume that no operator overlaps another, and the cost model does not, so that a plan may be predicted
to be slower; trials tell.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.job.layer_change import LayerChange
from costmodels.job.parallel_config import DIMENSIONS, HAND, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.changed_layers import shape_keys
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.io.errors import ConfigError
from tuner.forecast.prepared import Prepared
from tuner.forecast.stored_subject import as_first_stored, restore_subject
from tuner.planners.engine.workers import AbstractBound, ProcessWorkers
from tuner.planners.sharding.layer_axes import layer_axes
from tuner.plans.layer_planning import AUTO_SHAPES, LayerPlanning, shape_text
from tuner.plans.layer_tasks import LayerTask, freeze, layer_tasks, sharing_key
from tuner.plans.plan_cache import PlanCache, cache_folder, most_kept_bytes
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.meaning import first_difference
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study

OnPlanned = Callable[[int, int], None]
"""Function that is told how many shapes are planned, and of how many."""

OnNote = Callable[[str], None]
"""Function that is told a sentence for the user."""

SHAPES_AT_ONCE = 16
"""Least number of shapes between two progress calls; for no more, starting processes takes longer than planning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Plans of one shape.

    Attributes:
        change: Change of the cost model's layers by the plan.
        summary: Summary of the plan, as `summary_of` makes it; None where there is none by hand.
        by_hand: Summary of the plan by hand, likewise.
    """

    change: LayerChange | None = None
    summary: dict[str, Any] | None = None
    by_hand: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the plans as JSON."""
        change = None if self.change is None else asdict(self.change)
        return {"change": change, "summary": self.summary, "by_hand": self.by_hand}


def prepare(
    request: StudyRequest,
    stored: StoredStudies,
    chosen: ParallelConfig | None = None,
    *,
    runs: bool = False,
    leaders_first: bool = False,
    on_planned: OnPlanned = lambda _, __: None,
    on_note: OnNote = lambda _: None,
) -> Prepared:
    """Return the study with its layers planned, for all candidates or only the chosen configuration.

    Plans in the study's storage are reused. Under `auto` only a run plans, so that other commands answer at once: they
    take the plans that runs have made, unless a chosen configuration names a plan.

    Args:
        request: Request of the study file.
        stored: Studies in its storage.
        chosen: Configuration that alone is asked about; None for all candidates.
        runs: Whether trials will run the plans.
        leaders_first: Whether only the leading shapes are planned, where trials may run while others are; see
            `plan_rest`.
        on_planned: Function that is told the progress.
        on_note: Function that is told what is wrong with kept plans.

    Raises:
        ConfigError: The planner's pins cannot hold, or there are too many candidates to predict.
    """
    restore_subject(request, lambda: stored.look(request.name))
    if chosen is None:
        request = as_first_stored(request, lambda: stored.look(request.name))
    problem = request.problem
    if problem.planning.name == "megatron":
        return Prepared(request=request, problem=problem)
    if problem.planning.is_auto and not runs and (chosen is None or chosen.plan == HAND):
        study = stored.look(request.name)
        known = None if study is None else _plans_of(request, study)
        return Prepared(request=request, problem=_with_stored(problem, known))
    study = stored.find(request.name)
    known = None if study is None else _plans_of(request, study)
    leaders_first = leaders_first and runs and _may_plan_beside_trials(request)
    try:
        if chosen is None:
            _check_ways(problem)
        problem = plan_problem(
            problem,
            grid_to_plan(problem, chosen),
            stored=known,
            leading=leaders_first or problem.planning.is_auto,
            on_planned=on_planned,
            on_note=on_note,
        )
    except ConfigError as error:
        raise error.in_file(request.file) from None
    return Prepared(request=request, problem=problem, is_left_to_plan=leaders_first and _num_left(problem) > 0)


def _check_ways(problem: Problem) -> None:
    """Check that the ways of every hard pin divide the devices that some candidate has along its axis.

    Raises:
        ConfigError: A pin's ways divide those of no candidate that has the axis.
    """
    if not any(pin.ways for pin in problem.planning.pins):
        return
    from tuner.planners.sharding.pins import taken_ways  # noqa: PLC0415 # few studies have pins

    tasks = layer_tasks(problem.setting.job, problem.cluster, problem.space().grid, problem.planning)
    meshes = [layer_axes(task.config) or {} for task in tasks]
    for number, pin in enumerate(problem.planning.pins):
        along = {
            math.prod(sizes.values()) if pin.axis is None else sizes[pin.axis]
            for sizes in meshes
            if pin.axis is None or pin.axis in sizes
        }
        if along and all(taken_ways(pin, devices) is None for devices in along):
            where = "of its layers" if pin.axis is None else f"along {pin.axis}"
            raise ConfigError(
                f"divides the devices {where} of no candidate, which are {', '.join(map(str, sorted(along)))}",
                key=f"planner.pins[{number}].ways",
                value=pin.ways,
                nearest="weight_s makes a soft pin, which takes the nearest number that does",
            )


def plan_rest(prepared: Prepared, on_planned: OnPlanned, on_note: OnNote) -> Prepared:
    """Return a study of which leading shapes are planned with all of its shapes planned.

    Raises:
        ConfigError: There are too many candidates to predict.
    """
    request, problem = prepared.request, prepared.request.problem
    known = as_stored(prepared.problem)
    grid = grid_to_plan(problem, None)
    planned = plan_problem(problem, grid, stored=known, leading=False, on_planned=on_planned, on_note=on_note)
    return Prepared(request=request, problem=planned)


def _may_plan_beside_trials(request: StudyRequest) -> bool:
    """Return whether nothing but candidates depends on the plans; a mistake in a pin is told before the first trial."""
    planning = request.problem.planning
    return request.trials.proxy is None and not planning.pins and not planning.is_auto


def _num_left(problem: Problem) -> int:
    """Return the number of shapes without a plan."""
    tasks = layer_tasks(problem.setting.job, problem.cluster, problem.space().grid, problem.planning)
    return sum(shape_text(task.config) not in problem.layer_plans for task in tasks)


def prepare_stored(request: StudyRequest, study: Study) -> Prepared:
    """Return the study with the plans that its stored counterpart holds, which the caller has opened."""
    restore_subject(request, lambda: study)
    request = as_first_stored(request, lambda: study)
    problem = request.problem
    if problem.planning.name != "megatron":
        problem = _with_stored(problem, _plans_of(request, study))
    return Prepared(request=request, problem=problem)


def plan_problem(
    problem: Problem,
    grid: ConfigGrid,
    *,
    stored: Mapping[str, Any] | None = None,
    leading: bool | None = None,
    on_planned: OnPlanned = lambda _, __: None,
    on_note: OnNote = lambda _: None,
) -> Problem:
    """Return the problem with the plans of these candidates, and with the dimension `plan` if some differ.

    Only shapes are planned that `stored` lacks, which `as_stored` returned earlier.

    Args:
        problem: Problem.
        grid: Candidates, with the plan by hand.
        stored: Plans made earlier.
        leading: Whether at most AUTO_SHAPES shapes are planned, those of the fastest predicted candidates; None for
            what the planner asks for, which is so under `auto`.
        on_planned: Function that is told the progress.
        on_note: Function that is told what is wrong with kept plans.

    Raises:
        ConfigError: Pins cannot hold.
    """
    if problem.planning.name == "megatron":
        return problem
    changes = [_change_of(each) for each in stored["changes"]] if stored else []
    plans = dict(stored["plans"]) if stored else {}
    setting = problem.setting
    tasks = layer_tasks(setting.job, setting.cluster, grid, problem.planning)
    if (problem.planning.is_auto if leading is None else leading) and len(tasks) > AUTO_SHAPES:
        tasks = _leading(problem, grid, tasks)
    tasks = [task for task in tasks if shape_text(task.config) not in plans]
    if not tasks:
        return _with_plans(problem, changes, plans)
    found = _with_predictions(problem, grid, _plan_all(tasks, on_planned, on_note))
    plans |= {shape_text(task.config): each.summary for task, each in zip(tasks, found, strict=True)}
    return _with_plans(problem, [*changes, *(each.change for each in found if each.change is not None)], plans)


def _with_stored(problem: Problem, stored: Mapping[str, Any] | None) -> Problem:
    if not stored:
        return problem
    return _with_plans(problem, [_change_of(each) for each in stored["changes"]], stored["plans"])


def grid_to_plan(problem: Problem, chosen: ParallelConfig | None) -> ConfigGrid:
    """Return the candidates to plan, all with the plan by hand: those of the study, or the chosen configuration."""
    if chosen is None:
        return problem.space().grid
    return ConfigGrid.from_configs([replace(chosen, plan=HAND)], problem.options.opened)


def planned_in_words(problem: Problem) -> str:
    """Return a sentence on the shapes that `auto` left by hand; empty if it planned all of them."""
    if not problem.planning.is_auto or not problem.layer_plans:
        return ""
    grid = problem.space().grid
    tasks = layer_tasks(problem.setting.job, problem.cluster, grid, problem.planning)
    left = [task for task in tasks if shape_text(task.config) not in problem.layer_plans]
    if not left:
        return ""
    return (
        f"sharding plans were made for the layers of the {len(tasks) - len(left)} leading of {len(tasks)} shapes; "
        f"planner.name: {problem.planning.name} plans all"
    )


def as_stored(problem: Problem) -> dict[str, Any]:
    """Return the plans of a study as JSON."""
    changes = [asdict(change) for change in problem.setting.runtime.layer_changes]
    return {"changes": changes, "plans": dict(problem.layer_plans)}


def _plans_of(request: StudyRequest, study: Study) -> dict[str, Any] | None:
    from tuner.storage.record import LAYER_PLANS, MEANING  # noqa: PLC0415 # it loads Optuna

    attributes = study.user_attrs
    meaning = attributes.get(MEANING)
    if meaning is None or first_difference(meaning, json.loads(json.dumps(request.meaning))):
        return None
    found: dict[str, Any] | None = attributes.get(LAYER_PLANS)
    return found


def unused_pins(problem: Problem) -> tuple[str, ...]:
    """Return a sentence for each pin that no candidate's degrees allow."""
    used = {each["pin"] for plan in problem.layer_plans.values() if plan is not None for each in plan["pins"]}
    return tuple(
        f"planner.pins[{number}]: no candidate has the devices for {pin.in_words}"
        for number, pin in enumerate(problem.planning.pins)
        if pin.in_words not in used
    )


def by_hand(problem: Problem, chosen: ParallelConfig) -> dict[str, Any] | None:
    """Return the plan by hand of one configuration in the same form; None where it has nothing to shard."""
    grid = ConfigGrid.from_configs([chosen])
    tasks = layer_tasks(problem.setting.job, problem.cluster, grid, LayerPlanning())
    return _plan(tasks[0]).by_hand if tasks else None


def _leading(problem: Problem, grid: ConfigGrid, tasks: Sequence[LayerTask]) -> list[LayerTask]:
    """Return the tasks of the shapes whose fastest candidates are predicted to be the fastest, at most AUTO_SHAPES."""
    fastest_s = _fastest(problem.setting, grid)
    ordered = sorted(tasks, key=lambda task: fastest_s[shape_keys(ConfigGrid.from_configs([task.config]))[0]])
    return ordered[:AUTO_SHAPES]


def _fastest(setting: Setting, grid: ConfigGrid) -> dict[tuple[int, ...], float]:
    """Return the predicted step time of the fastest candidate of each shape [s]."""
    step_time_s = estimate_step(setting, grid, memory=estimate_memory(setting, grid)).step_time_s.tolist()
    fastest: dict[tuple[int, ...], float] = {}
    for key, seconds in zip(shape_keys(grid), step_time_s, strict=True):
        fastest[key] = min(fastest.get(key, math.inf), seconds)
    return fastest


def _with_predictions(problem: Problem, grid: ConfigGrid, found: Sequence[_Found]) -> list[_Found]:
    """Return the plans with the predicted step time of the fastest candidate of each shape, relative to by hand."""
    changes = tuple(each.change for each in found if each.change is not None)
    if not changes:
        return list(found)
    setting = problem.setting
    changed = replace(setting, runtime=replace(setting.runtime, layer_changes=changes))
    as_planned = replace(grid, plan=np.full(len(grid), DIMENSIONS["plan"].code_of(problem.planning.name)))
    by_hand_s, planned_s = _fastest(setting, grid), _fastest(changed, as_planned)
    return [
        each
        if each.change is None or each.summary is None
        else replace(
            each,
            summary=each.summary | {"predicted_ratio": planned_s[each.change.shape] / by_hand_s[each.change.shape]},
        )
        for each in found
    ]


def _with_plans(
    problem: Problem, changes: Sequence[LayerChange], plans: Mapping[str, dict[str, Any] | None]
) -> Problem:
    runtime = replace(problem.setting.runtime, layer_changes=tuple(changes))
    options = problem.options
    if changes and "plan" not in options.opened:
        options = replace(options, opened=(*options.opened, "plan"))
    subject = problem.subject.with_setting(replace(problem.setting, runtime=runtime))
    return replace(problem, subject=subject, options=options, layer_plans=plans)


def _change_of(stored: Mapping[str, Any]) -> LayerChange:
    """Return a change as it was before JSON made lists of its tuples."""
    return LayerChange(**{key: freeze(value) for key, value in stored.items()})


def _plan_all(tasks: Sequence[LayerTask], on_planned: OnPlanned, on_note: OnNote) -> list[_Found]:
    """Return the plans of all tasks, in their order: those that an earlier study kept, and new ones, which are kept."""
    cache = PlanCache(cache_folder(), most_kept_bytes())
    found: dict[int, _Found] = {}
    for number, task in enumerate(tasks):
        kept = cache.find(task)
        if kept is not None:
            found[number] = _found_of(kept)
    on_planned(len(found), len(tasks))
    # Tasks that share their graph and cost tables are planned one after the other, by one process.
    left = sorted(set(range(len(tasks))) - found.keys(), key=lambda number: sharing_key(tasks[number]))
    groups = [list(several) for _, several in groupby(left, key=lambda number: sharing_key(tasks[number]))]
    with _start_planner(len(left)) as planned:
        for some in _in_batches(groups, SHAPES_AT_ONCE):
            try:
                results = planned([[tasks[number] for number in group] for group in some])
            except ConfigError as error:
                raise error.under("planner") from None
            for number, one in zip(chain(*some), chain(*results), strict=True):
                found[number] = one
                cache.keep(tasks[number], one.as_json())
            on_planned(len(found), len(tasks))
    if left:
        cache.trim()
    for note in cache.notes:
        on_note(note)
    return [found[number] for number in range(len(tasks))]


def _in_batches(groups: Sequence[list[int]], least: int) -> Iterator[list[list[int]]]:
    """Yield the groups in their order, as many at once as have at least so many entries together."""
    some: list[list[int]] = []
    for group in groups:
        some.append(group)
        if sum(map(len, some)) >= least:
            yield some
            some = []
    if some:
        yield some


@contextmanager
def _start_planner(num_tasks: int) -> Iterator[Callable[[Sequence[Sequence[LayerTask]]], list[list[_Found]]]]:
    """Return a function that plans several groups of shapes, on all cores if there are many."""
    if num_tasks <= SHAPES_AT_ONCE:
        yield lambda groups: [_plan_several(tasks, None) for tasks in groups]
        return
    with ProcessWorkers(os.cpu_count() or 1) as workers:
        yield lambda groups: workers.map(_plan_several, groups)


def _plan_several(tasks: Sequence[LayerTask], _: AbstractBound | None) -> list[_Found]:
    return [_plan(task) for task in tasks]


def _plan(task: LayerTask) -> _Found:
    from tuner.plans.layer_plans import plan_layer, summary_of  # noqa: PLC0415 # it loads the planners

    planned = plan_layer(task)
    if planned is None:
        return _Found()
    same = replace(planned, found=planned.by_hand, cost=planned.by_hand_cost, change=None)
    return _Found(change=planned.change, summary=summary_of(task, planned), by_hand=summary_of(task, same))


def _found_of(kept: Mapping[str, Any]) -> _Found:
    change = kept["change"]
    return _Found(
        change=None if change is None else _change_of(change), summary=kept["summary"], by_hand=kept["by_hand"]
    )
