"""Which configuration to train with while the cluster changes, and when it pays to change it.

The cluster of a study is a sequence of clusters, each for a stretch of time ("Rethinking Dynamic Networks and
Heterogeneous Computing with Automatic Parallelization", section 2.2; hardware/dynamics.py). In each stretch a few
setups may run: configurations on all hosts or on some (scenes.py), with step times that the study's trials have
corrected. Changing from one to another takes time, and the loss of a host takes the steps since the last checkpoint.
The plan is the timeline that makes the most steps until the end, or the one of somebody who foresees nothing
(timeline.py).

What it is compared with is staying: the study's best configuration runs wherever all hosts are there. While some are
lost it waits, if all of them return before the end; else it goes on with the same degrees and less data parallelism,
on as many of the hosts that are left as that can occupy.

What a change costs is a matter of assumptions, which stand in `Assumptions`:
- The first setup begins for nothing, as a job has to begin anyhow.
- Who ends a setup by choice writes a checkpoint first, and whoever begins one starts the processes and reads it: the
  weights and optimizer states of every device over the slower of the storage and the device's way to other hosts.
- A loss takes back half the time between two checkpoints, or what the stretch before it took if that is less.
- To wait costs nothing but the time, and the start afterwards.
- Time that a change takes is paid in full, in steps of the setup that it ends or begins as fast as that is then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from optuna import Study

from costmodels.job.parallel_config import ParallelConfig
from hardware.dynamics import Trace, intervals
from hardware.io.errors import ConfigError
from tuner.answers.best import best_known
from tuner.replan.cluster_states import (
    Course,
    Figures,
    Options,
    Pricing,
    Setup,
    cluster_of,
    options_over,
)
from tuner.replan.network import hosts_named
from tuner.replan.timeline import Choices, best_timeline, steps_of, unforeseen_timeline
from tuner.run.loop import check_meaning
from tuner.search.prior import ignore_progress
from tuner.storage.opening import find_study
from tuner.study_file.config import StudyConfig

AFTER_LAST_S = 3600.0
"""How long a trace goes on after its last event, where nobody says until when."""

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    # the time that nine traces of ten do not exceed, so that one that never ends counts as such
    "p90": lambda values: float(np.quantile(values, 0.9, method="higher")),
}
"""What makes one number of the times per token over a set of traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What changing the configuration is taken to cost; all of it assumed, each an option of `meshtune replan`.

    Attributes:
        restart_s: To stop all processes, start them again and set up their communication.
        storage_bytes_per_s: What one host reads from, or writes to, the storage of checkpoints.
        checkpoint_every_s: Time between two checkpoints; a loss costs half of it.
    """

    restart_s: float = 120.0
    storage_bytes_per_s: float = 5e9
    checkpoint_every_s: float = 1800.0

    def transfer_s(self, figures: Figures) -> float:
        """To write or to read a checkpoint."""
        of_device = self.storage_bytes_per_s / figures.devices_per_host
        return figures.state_bytes / min(of_device, figures.nic_bytes_per_s)


DEFAULTS = Assumptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What runs in one interval of a timeline.

    Attributes:
        from_s: Where it begins [s].
        to_s: Where it ends [s].
        setup: What runs; None where the job waits.
        step_time_s: Its step; None where the job waits.
        steps: Steps that it makes, less those that the change at its beginning costs.
        switch_s: Time that the change takes: to write a checkpoint, to start, and to read it.
        lost_work_s: Work before the interval that a loss took back.
        reason: Why this runs, in words.
    """

    from_s: float
    to_s: float
    setup: Setup | None
    step_time_s: float | None
    steps: float
    switch_s: float
    lost_work_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What runs in each interval.

    Attributes:
        stretches: One for each interval.
        steps: Steps of all of them.
    """

    stretches: tuple[Stretch, ...]
    steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The best timeline and that of staying.

    Attributes:
        best: The one that makes the most steps.
        staying: What the study's best configuration makes; None where the study has none.
        until_s: Where both end [s].
        assumptions: What they rest on.
        num_scenes: States of the cluster that were looked at.
        num_trials: Trials of the study that corrected the predictions.
    """

    best: Timeline
    staying: Timeline | None
    until_s: float
    assumptions: Assumptions
    num_scenes: int
    num_trials: int

    @property
    def gain_over_staying(self) -> float | None:
        """Steps of the plan over those of staying, less 1; None where staying makes none."""
        return gain(self.best.steps, self.staying.steps if self.staying else 0.0)

    @property
    def works(self) -> bool:
        """Whether anything can run at all."""
        return any(stretch.setup is not None for stretch in self.best.stretches)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnTrace:
    """What one configuration makes of one trace if nobody changes it.

    Attributes:
        steps: Steps until the end.
        time_per_token_s: Time per token; inf where no step is made.
    """

    steps: float
    time_per_token_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustChoice:
    """The one configuration that does best over several traces.

    Attributes:
        config: The configuration; None if none makes a step.
        of_traces: What it makes of each.
        figure_s: The statistic of its times per token.
        best: The study's best configuration, None without one, with the same figures.
        of_traces_best: What that makes of each trace.
        figure_best_s: The statistic of it; inf without one.
        num_configs: Configurations that were compared.
    """

    config: ParallelConfig | None
    of_traces: tuple[OnTrace, ...]
    figure_s: float
    best: ParallelConfig | None
    of_traces_best: tuple[OnTrace, ...]
    figure_best_s: float
    num_configs: int


def gain(steps: float, staying: float) -> float | None:
    """How much more steps are made; None where staying makes none."""
    return steps / staying - 1 if staying > 0 else None


def end_of(trace: Trace, until_s: float | None) -> float:
    """Where a trace ends: `until_s`, or AFTER_LAST_S after the last event.

    Raises:
        ConfigError: something happens later.
    """
    last_s = trace.events[-1].time_s if trace.events else 0.0
    if until_s is None:
        return last_s + AFTER_LAST_S
    if until_s <= last_s:
        raise ConfigError(
            "must be later than the last event of the trace",
            key="--until",
            value=f"{until_s:g}",
            nearest=f"above {last_s:g}",
        )
    return until_s


def course_of(config: StudyConfig, trace: Trace, until_s: float | None) -> Course:
    """The intervals of a trace."""
    return Course(trace=trace, intervals=intervals(config.setting.cluster, trace, end_of(trace, until_s)))


def replanned(
    config: StudyConfig,
    trace: Trace,
    *,
    until_s: float | None = None,
    assumptions: Assumptions = DEFAULTS,
    foresees: bool = True,
    on_progress: Callable[[str], None] = ignore_progress,
) -> Plan:
    """The best timeline over a trace.

    Args:
        config: The study.
        trace: How its cluster changes.
        until_s: Where the plan ends.
        assumptions: What a change costs.
        foresees: Whether the plan knows what comes next; otherwise each choice is made as if nothing came any more.
        on_progress: Called with a line of text before what takes seconds.

    Raises:
        ConfigError: something happens after `until_s`, or the stored study means something else.
    """
    course, pricing, study = course_of(config, trace, until_s), Pricing(config), _stored(config)
    found = best_known(config, study)
    staying = stays(pricing, course, found.config) if found else None
    besides = [setup for setup in dict.fromkeys(staying or ()) if setup is not None]
    options = options_over(pricing, [course], besides, study, on_progress=on_progress)
    priced = _Priced(course, options, 0, assumptions)
    lengths_s = np.array([interval.to_s - interval.from_s for interval in course.intervals])
    chosen = best_timeline(priced.choices) if foresees else unforeseen_timeline(priced.choices, lengths_s)
    return Plan(
        best=priced.timeline(chosen),
        staying=priced.timeline(priced.places(staying), plans=False) if staying else None,
        until_s=course.intervals[-1].to_s,
        assumptions=assumptions,
        num_scenes=options.num_scenes,
        num_trials=options.num_trials,
    )


def robust_choice(
    config: StudyConfig,
    traces: Sequence[Trace],
    statistic: str,
    *,
    until_s: float | None = None,
    assumptions: Assumptions = DEFAULTS,
    on_progress: Callable[[str], None] = ignore_progress,
) -> RobustChoice:
    """The one configuration with the best statistic of the time per token over several traces, if nobody changes it.

    Args:
        config: The study.
        traces: What may happen.
        statistic: Name in STATISTICS.
        until_s: Where each ends.
        assumptions: What a restart costs.
        on_progress: Called with a line of text before what takes seconds.

    Raises:
        ConfigError: something happens after `until_s`, or the stored study means something else.
    """
    courses = [course_of(config, trace, until_s) for trace in traces]
    pricing, study = Pricing(config), _stored(config)
    found = best_known(config, study)
    whole = pricing.all_hosts
    clusters = dict.fromkeys(
        cluster_of(pricing.nominal, course.trace, interval.from_s, whole)
        for course in courses
        for interval in course.intervals
        if interval.hosts == whole
    )
    configs = dict.fromkeys(one for cluster in clusters for one in pricing.ranked((pricing.nominal, cluster)).configs)
    if found is not None:
        configs = dict.fromkeys([*configs, found.config])
    timelines = {one: [stays(pricing, course, one) for course in courses] for one in configs}
    besides = dict.fromkeys(
        setup for courses_of in timelines.values() for course in courses_of for setup in course if setup is not None
    )
    options = options_over(pricing, courses, list(besides), study, on_progress=on_progress)
    priced = [_Priced(course, options, at, assumptions) for at, course in enumerate(courses)]
    tokens = config.setting.job.tokens_per_step
    of_traces = {
        one: tuple(
            on_trace(float(steps_of(each.choices, each.places(course)).sum()), each.until_s, tokens)
            for each, course in zip(priced, courses_of, strict=True)
        )
        for one, courses_of in timelines.items()
    }
    figures_s = {
        one: STATISTICS[statistic]([each.time_per_token_s for each in told]) for one, told in of_traces.items()
    }
    chosen = min(figures_s, key=lambda one: figures_s[one], default=None)
    if chosen is not None and not any(each.steps > 0 for each in of_traces[chosen]):
        chosen = None
    best = found.config if found else None
    return RobustChoice(
        config=chosen,
        of_traces=of_traces[chosen] if chosen else (),
        figure_s=figures_s[chosen] if chosen else math.inf,
        best=best,
        of_traces_best=of_traces[best] if best else (),
        figure_best_s=figures_s[best] if best else math.inf,
        num_configs=len(configs),
    )


def on_trace(steps: float, until_s: float, tokens_per_step: float) -> OnTrace:
    """The figures of so many steps until a time."""
    return OnTrace(
        steps=max(steps, 0.0), time_per_token_s=until_s / (steps * tokens_per_step) if steps > 0 else math.inf
    )


def stays(pricing: Pricing, course: Course, config: ParallelConfig) -> list[Setup | None]:
    """What staying with a configuration of all hosts means in each interval; None where the job waits."""
    whole = Setup(hosts=pricing.all_hosts, config=config)
    is_whole = [interval.hosts == pricing.all_hosts for interval in course.intervals]
    found: list[Setup | None] = []
    for at, interval in enumerate(course.intervals):
        before = found[-1] if found else None
        if is_whole[at]:
            found.append(whole)
        elif any(is_whole[at:]):
            found.append(None)
        elif before is not None and {*interval.hosts} >= {*before.hosts}:
            found.append(before)
        else:
            found.append(pricing.smaller(config, interval))
    return found


def _stored(config: StudyConfig) -> Study | None:
    """The study in its storage, if its trials mean what the study file says; None before its first trial."""
    study = find_study(config.storage, config.name)
    if study is not None and study.get_trials(deepcopy=False):
        check_meaning(config, study)
        return study
    return None


class _Priced:
    """A course whose setups have steps and prices; the last option is to wait."""

    def __init__(self, course: Course, options: Options, number: int, assumptions: Assumptions) -> None:
        self.course, self.setups, self.assumptions = course, options.setups, assumptions
        self.figures = options.figures[number]
        self.wait = len(self.setups)
        self.until_s = course.intervals[-1].to_s
        shape = (len(course.intervals), self.wait + 1)
        runs = np.zeros(shape, dtype=np.bool_)
        steps, begin_steps, end_steps = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        runs[:, self.wait] = True
        for at, interval in enumerate(course.intervals):
            for option, one in self.figures[at].items():
                runs[at, option] = True
                steps[at, option] = (interval.to_s - interval.from_s) / one.step_time_s
                begin_steps[at, option] = self.begin_s(at, option) / one.step_time_s
            for option, one in self.figures[at - 1].items() if at else ():
                end_steps[at, option] = sum(self.end_s(at, option)) / one.step_time_s
        self.choices = Choices(runs=runs, steps=steps, begin_steps=begin_steps, end_steps=end_steps)

    def begin_s(self, at: int, option: int) -> float:
        """What it takes to begin an option with an interval."""
        return self.assumptions.restart_s + self.assumptions.transfer_s(self.figures[at][option])

    def end_s(self, at: int, option: int) -> tuple[float, float]:
        """To write a checkpoint of what ran before an interval, and the work that a loss took back: one of both."""
        before = self.course.intervals[at - 1]
        if {*self.course.intervals[at].hosts} >= {*self.setups[option].hosts}:
            return self.assumptions.transfer_s(self.figures[at - 1][option]), 0.0
        return 0.0, min(self.assumptions.checkpoint_every_s / 2, before.to_s - before.from_s)

    def places(self, timeline: Sequence[Setup | None]) -> tuple[int, ...]:
        """The options that a timeline names; it waits where a setup of it cannot run."""
        place = {setup: at for at, setup in enumerate(self.setups)}
        found = [self.wait if setup is None else place.get(setup, self.wait) for setup in timeline]
        return tuple(option if self.choices.runs[at, option] else self.wait for at, option in enumerate(found))

    def timeline(self, chosen: Sequence[int], *, plans: bool = True) -> Timeline:
        """The timeline of those options, with reasons; `plans` says whether it is the best or that of staying."""
        made = steps_of(self.choices, chosen)
        stretches = []
        for at, (interval, option) in enumerate(zip(self.course.intervals, chosen, strict=True)):
            before = chosen[at - 1] if at else option
            saved_s, lost_s = self.end_s(at, before) if option != before != self.wait else (0.0, 0.0)
            begun_s = self.begin_s(at, option) if option not in (before, self.wait) else 0.0
            waits = option == self.wait
            stretches.append(
                Stretch(
                    from_s=interval.from_s,
                    to_s=interval.to_s,
                    setup=None if waits else self.setups[option],
                    step_time_s=None if waits else self.figures[at][option].step_time_s,
                    steps=float(made[at]),
                    switch_s=saved_s + begun_s,
                    lost_work_s=lost_s,
                    reason=self._reason(at, chosen, plans=plans),
                )
            )
        return Timeline(stretches=tuple(stretches), steps=float(made.sum()))

    def _reason(self, at: int, chosen: Sequence[int], *, plans: bool) -> str:
        """Why an option runs in an interval."""
        interval, option = self.course.intervals[at], chosen[at]
        happened = ", ".join(map(str, interval.events))
        before = chosen[at - 1] if at else None
        lost = set() if before in (None, self.wait) else {*self.setups[before].hosts} - {*interval.hosts}
        if option == self.wait:
            what = f"waits for {hosts_named(lost)}" if lost else "waits"
            what = what if self.figures[at] else "nothing can run"
        elif before is None:
            what = "the beginning"
        elif option == before:
            what = "goes on, as no change would pay" if plans else "goes on"
        elif before == self.wait:
            what = "it can run again"
        elif not plans:
            what = "the same degrees with less data parallelism"
        elif lost:
            idle = len(interval.hosts) - len(self.setups[option].hosts)
            rest = f", {idle} of them idle" if idle else ""
            what = f"the fastest on the {len(interval.hosts)} hosts that are left{rest}"
        else:
            what = self._why_it_pays(at, chosen)
        return f"{happened}: {what}" if happened else what

    def _why_it_pays(self, at: int, chosen: Sequence[int]) -> str:
        """What a change by choice brings until the next one, in place of going on."""
        before, option = chosen[at - 1], chosen[at]
        end = next((later for later in range(at, len(chosen)) if chosen[later] != option), len(chosen))
        stops = next((later for later in range(at, end) if not self.choices.runs[later, before]), end)
        lost = set() if stops == end else {*self.setups[before].hosts} - {*self.course.intervals[stops].hosts}
        end = end if lost else max(stops, at + 1)  # what is not priced is too slow, and nobody knows by how much
        more = self.choices.steps[at:end, option].sum() - self.choices.steps[at:end, before].sum()
        old, step_s = self.figures[at].get(before), self.figures[at][option].step_time_s
        told = [f"{step_s:.4g} s per step in place of {old.step_time_s:.4g} s"] if old else []
        if lost:
            from_s = self.course.intervals[stops].from_s
            told.append(f"{hosts_named(lost)} will be lost at {from_s:g} s, and to change before that loses no work")
        until_s = self.course.intervals[end - 1].to_s
        switch_s = sum(self.end_s(at, before)) + self.begin_s(at, option)
        return "; ".join([*told, f"{more:,.0f} more steps until {until_s:g} s pay for {switch_s:.0f} s of change"])


def plan_json(config: StudyConfig, plan: Plan) -> dict[str, Any]:
    """What `meshtune replan` prints of a plan."""
    return {
        "timeline": timeline_json(config, plan.best),
        "steps": plan.best.steps,
        "tokens": plan.best.steps * config.setting.job.tokens_per_step,
        "gain_over_staying": plan.gain_over_staying,
        "staying": None
        if plan.staying is None
        else {"timeline": timeline_json(config, plan.staying), "steps": plan.staying.steps},
        "until_s": plan.until_s,
        "assumptions": asdict(plan.assumptions),
        "trials": plan.num_trials,
    }


def timeline_json(config: StudyConfig, timeline: Timeline) -> list[dict[str, Any]]:
    """A timeline, a mapping for each interval."""
    return [
        {
            "from_s": one.from_s,
            "to_s": one.to_s,
            "config": None if one.setup is None else one.setup.config.values(config.dimensions),
            "hosts": [] if one.setup is None else list(one.setup.hosts),
            "step_time_s": one.step_time_s,
            "steps": one.steps,
            "switch_s": one.switch_s,
            "lost_work_s": one.lost_work_s,
            "reason": one.reason,
        }
        for one in timeline.stretches
    ]


def robust_json(config: StudyConfig, choice: RobustChoice, traces: Sequence[str], statistic: str) -> dict[str, Any]:
    """What `meshtune replan --robust` prints."""

    def told(of_traces: Sequence[OnTrace]) -> list[dict[str, Any]]:
        return [
            {"trace": name, "steps": one.steps, "time_per_token_s": _finite(one.time_per_token_s)}
            for name, one in zip(traces, of_traces, strict=True)
        ]

    ratio = choice.figure_best_s / choice.figure_s if math.isfinite(choice.figure_s) else math.inf
    return {
        "config": None if choice.config is None else choice.config.values(config.dimensions),
        "statistic": statistic,
        "time_per_token_s": _finite(choice.figure_s),
        "traces": told(choice.of_traces) if choice.config else [],
        "gain_over_staying": ratio - 1 if math.isfinite(ratio) else None,
        "staying": None
        if choice.best is None
        else {
            "config": choice.best.values(config.dimensions),
            "time_per_token_s": _finite(choice.figure_best_s),
            "traces": told(choice.of_traces_best),
        },
        "configs": choice.num_configs,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
