"""Plan of configuration changes while the cluster changes: what to train with, and when changing pays off.

The cluster of a study becomes a sequence of clusters, one for each time interval ("Rethinking Dynamic Networks and
Heterogeneous Computing with Automatic Parallelization", section 2.2; hardware/dynamics.py). In each interval several
setups may run: configurations on all hosts or on some (cluster_states.py), with step times corrected by the study's
trials. Changing from one setup to another takes time, and the loss of a host loses the steps since the last
checkpoint. The plan is the timeline with the most steps until the end. Without foresight, each choice is made as if no
further event followed (timeline.py).

The plan is compared with staying: the study's best configuration runs whenever all hosts are there. While some hosts
are lost it waits, if all of them return before the end. Otherwise it continues with the same degrees and less data
parallelism, on as many of the remaining hosts as it can occupy.

The cost of a change rests on these assumptions (class `Assumptions`):
- The first setup begins for free, since any job has to begin.
- A setup that ends by choice writes a checkpoint first. A setup that begins starts its processes and reads the
  checkpoint: the weights and optimizer states of every device, over the slower of the storage and the device's network.
- The loss of a host loses half the time between two checkpoints, or the whole previous interval if that is shorter.
- Waiting costs only the time, and the start afterwards.
- The time of a change is charged in full, in steps of the setup that it ends or begins, at its step time then.
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
from hardware.rounding import predicted
from tuner.answers.best import best_known
from tuner.forecast.prepared import Prepared
from tuner.replan.cluster_states import Course, Figures, Options, Pricing, Setup, cluster_of, options_over
from tuner.replan.network import name_hosts
from tuner.replan.timeline import Choices, best_timeline, steps_of, unforeseen_timeline
from tuner.run.studies import check_meaning
from tuner.search.prior import ignore_progress
from tuner.storage.opening import find_study
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

AFTER_LAST_S = 3600.0
"""Default length of a trace after its last event [s]."""

STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    # no interpolation: a trace without any step counts as inf
    "p90": lambda values: float(np.quantile(values, 0.9, method="higher")),
}
"""Statistics that summarise the times per token over a set of traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Assumed cost of changing the configuration; each value is an option of `meshtune replan`.

    Attributes:
        restart_s: Time to stop all processes, start them again and set up their communication [s].
        storage_bytes_per_s: Bandwidth between one host and the checkpoint storage [bytes/s].
        checkpoint_every_s: Time between two checkpoints [s]; a loss costs half of it.
    """

    restart_s: float = 120.0
    storage_bytes_per_s: float = 5e9
    checkpoint_every_s: float = 1800.0

    def transfer_s(self, figures: Figures) -> float:
        """Compute the time to write or read a checkpoint [s]."""
        of_device = self.storage_bytes_per_s / figures.devices_per_host
        return figures.state_bytes / min(of_device, figures.nic_bytes_per_s)

    def begin_s(self, figures: Figures) -> float:
        """Compute the time to begin a setup: restart and reading the checkpoint [s]."""
        return self.restart_s + self.transfer_s(figures)

    def end_s(self, figures: Figures, *, ran_s: float, is_whole: bool) -> tuple[float, float]:
        """Compute the time to checkpoint a setup that ends, and the work lost with its hosts [s].

        Args:
            figures: Figures of the setup that ends.
            ran_s: Time for which the setup has run [s].
            is_whole: Whether all hosts of the setup are still there. Then it writes a checkpoint; otherwise the work
                since the last one is lost.
        """
        return (self.transfer_s(figures), 0.0) if is_whole else (0.0, min(self.checkpoint_every_s / 2, ran_s))


DEFAULTS = Assumptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Activity during one interval of a timeline.

    Attributes:
        from_s: Start of the interval [s].
        to_s: End of the interval [s].
        setup: Setup that runs; None while the job waits.
        step_time_s: Time of one step of the setup [s]; None while the job waits.
        steps: Steps made in the interval, minus those that the change at its beginning costs.
        switch_s: Duration of the change [s]: writing a checkpoint, restarting and reading the checkpoint.
        lost_work_s: Work of the previous interval lost with a host [s].
        reason: Reason for the setup, as text.
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
    """Setups of all intervals.

    Attributes:
        stretches: Activity in each interval.
        steps: Total number of steps.
    """

    stretches: tuple[Stretch, ...]
    steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Best timeline, and the timeline of staying with the study's best configuration.

    Attributes:
        best: Timeline with the most steps.
        staying: Timeline of the study's best configuration; None if the study has none.
        until_s: End of both timelines [s].
        assumptions: Assumed costs of a change.
        num_states: Number of cluster states that were priced.
        num_trials: Number of the study's trials that corrected the predictions.
    """

    best: Timeline
    staying: Timeline | None
    until_s: float
    assumptions: Assumptions
    num_states: int
    num_trials: int

    @property
    def gain_over_staying(self) -> float | None:
        """Relative gain in steps over staying; None if staying makes no step."""
        return gain(self.best.steps, self.staying.steps if self.staying else 0.0)

    @property
    def works(self) -> bool:
        """Whether any setup can run at all."""
        return any(stretch.setup is not None for stretch in self.best.stretches)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnTrace:
    """Result of one configuration that is kept during a whole trace.

    Attributes:
        steps: Number of steps until the end.
        time_per_token_s: Time per token [s]; inf without any step.
    """

    steps: float
    time_per_token_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RobustChoice:
    """Configuration with the best statistic over several traces.

    Attributes:
        config: Best configuration; None if no configuration makes a step.
        of_traces: Results of the configuration on each trace.
        figure_s: Statistic of its times per token [s].
        best: The study's best configuration, for comparison; None without one.
        of_traces_best: Results of the study's best configuration on each trace.
        figure_best_s: Statistic of the study's best configuration [s]; inf without one.
        num_configs: Number of configurations that were compared.
    """

    config: ParallelConfig | None
    of_traces: tuple[OnTrace, ...]
    figure_s: float
    best: ParallelConfig | None
    of_traces_best: tuple[OnTrace, ...]
    figure_best_s: float
    num_configs: int


def gain(steps: float, staying: float) -> float | None:
    """Compute the relative gain in steps over staying; None if staying makes no step."""
    return steps / staying - 1 if staying > 0 else None


def end_of(trace: Trace, until_s: float | None) -> float:
    """Return the end of a trace: `until_s`, or AFTER_LAST_S after the last event [s].

    Raises:
        ConfigError: An event happens after `until_s`.
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


def course_of(problem: Problem, trace: Trace, until_s: float | None) -> Course:
    """Split a trace into its intervals."""
    return Course(trace=trace, intervals=intervals(problem.cluster, trace, end_of(trace, until_s)))


def replan_trace(
    prepared: Prepared,
    trace: Trace,
    *,
    until_s: float | None = None,
    assumptions: Assumptions = DEFAULTS,
    foresees: bool = True,
    on_progress: Callable[[str], None] = ignore_progress,
) -> Plan:
    """Find the best timeline over a trace.

    Args:
        prepared: Study whose cluster changes.
        trace: Events that change the cluster.
        until_s: End of the plan [s]; None for the default.
        assumptions: Assumed costs of a change.
        foresees: Whether the plan knows the later events; otherwise each choice assumes that no event follows.
        on_progress: Function called with a line of text before each step that takes seconds.

    Raises:
        ConfigError: An event happens after `until_s`, or the study file contradicts the stored study.
    """
    course, pricing, study = (
        course_of(prepared.problem, trace, until_s),
        Pricing(prepared),
        find_stored(prepared.request),
    )
    found = best_known(prepared, study)
    staying = stays(pricing, course, found.config) if found else None
    # The setups of staying are priced in any case, so that both timelines rest on the same figures.
    besides = [setup for setup in dict.fromkeys(staying or ()) if setup is not None]
    options = options_over(pricing, [course], besides, study, on_progress=on_progress)
    priced = PricedCourse(course, options, 0, assumptions)
    lengths_s = np.array([interval.to_s - interval.from_s for interval in course.intervals])
    chosen = best_timeline(priced.choices) if foresees else unforeseen_timeline(priced.choices, lengths_s)
    return Plan(
        best=priced.timeline(chosen),
        staying=priced.timeline(priced.places(staying), plans=False) if staying else None,
        until_s=course.intervals[-1].to_s,
        assumptions=assumptions,
        num_states=options.num_states,
        num_trials=options.num_trials,
    )


def robust_choice(
    prepared: Prepared,
    traces: Sequence[Trace],
    statistic: str,
    *,
    until_s: float | None = None,
    assumptions: Assumptions = DEFAULTS,
    on_progress: Callable[[str], None] = ignore_progress,
) -> RobustChoice:
    """Find the configuration with the best statistic of the time per token over several traces, if it is never changed.

    Args:
        prepared: Study whose cluster changes.
        traces: Possible sequences of events.
        statistic: Name of the statistic in STATISTICS.
        until_s: End of each trace [s]; None for the default.
        assumptions: Assumed costs of a restart.
        on_progress: Function called with a line of text before each step that takes seconds.

    Raises:
        ConfigError: An event happens after `until_s`, or the study file contradicts the stored study.
    """
    courses = [course_of(prepared.problem, trace, until_s) for trace in traces]
    pricing, study = Pricing(prepared), find_stored(prepared.request)
    found = best_known(prepared, study)
    whole = pricing.all_hosts
    # Candidates: configurations that rank high in any state with all hosts, and the study's best.
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
    priced = [PricedCourse(course, options, at, assumptions) for at, course in enumerate(courses)]
    tokens = prepared.problem.setting.job.tokens_per_step
    of_traces = {
        one: tuple(
            on_trace(float(steps_of(each.choices, each.places(course)).sum()), each.until_s, tokens)
            for each, course in zip(priced, courses_of, strict=True)
        )
        for one, courses_of in timelines.items()
    }
    # A trace without any step has an infinite time per token, which makes the mean infinite too.
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
    """Compute the result of making `steps` steps until a time."""
    return OnTrace(
        steps=max(steps, 0.0), time_per_token_s=until_s / (steps * tokens_per_step) if steps > 0 else math.inf
    )


def stays(pricing: Pricing, course: Course, config: ParallelConfig) -> list[Setup | None]:
    """List the setup in each interval when staying with a configuration of all hosts; None while the job waits."""
    whole = Setup(hosts=pricing.all_hosts, config=config)
    is_whole = [interval.hosts == pricing.all_hosts for interval in course.intervals]
    found: list[Setup | None] = []
    for at, interval in enumerate(course.intervals):
        # While some hosts are lost: wait if all return later, else keep the reduced setup as long as its hosts exist.
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


def find_stored(request: StudyRequest) -> Study | None:
    """Return the stored study, checking that its trials match the study file; None before its first trial."""
    study = find_study(request.storage, request.name)
    if study is not None and study.get_trials(deepcopy=False):
        check_meaning(request, study)
        return study
    return None


class PricedCourse:
    """Course whose setups have steps and prices; the last option is to wait."""

    def __init__(self, course: Course, options: Options, number: int, assumptions: Assumptions) -> None:
        self.course, self.setups, self.assumptions = course, options.setups, assumptions
        self.figures = options.figures[number]
        self.wait = len(self.setups)
        self.until_s = course.intervals[-1].to_s
        shape = (len(course.intervals), self.wait + 1)
        # Prices are counted in steps of the option itself: seconds of the change over its step time in that interval.
        # Waiting has neither steps nor prices.
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
        """Compute the time to begin an option with an interval [s]."""
        return self.assumptions.begin_s(self.figures[at][option])

    def end_s(self, at: int, option: int) -> tuple[float, float]:
        """Compute the time to checkpoint the previous interval's option, and the work lost with a host [s]."""
        before = self.course.intervals[at - 1]
        is_whole = {*self.course.intervals[at].hosts} >= {*self.setups[option].hosts}
        ran_s = before.to_s - before.from_s
        return self.assumptions.end_s(self.figures[at - 1][option], ran_s=ran_s, is_whole=is_whole)

    def places(self, timeline: Sequence[Setup | None]) -> tuple[int, ...]:
        """Return the options of a timeline's setups; a setup that cannot run is replaced by waiting."""
        place = {setup: at for at, setup in enumerate(self.setups)}
        found = [self.wait if setup is None else place.get(setup, self.wait) for setup in timeline]
        return tuple(option if self.choices.runs[at, option] else self.wait for at, option in enumerate(found))

    def timeline(self, chosen: Sequence[int], *, plans: bool = True) -> Timeline:
        """Build the timeline of the options, with reasons; `plans` is False for the timeline of staying."""
        made = steps_of(self.choices, chosen)
        stretches = []
        for at, (interval, option) in enumerate(zip(self.course.intervals, chosen, strict=True)):
            before = chosen[at - 1] if at else option
            # A change costs the end of the previous option and the beginning of the next; waiting has neither.
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
        """Explain why an option runs in an interval."""
        interval, option = self.course.intervals[at], chosen[at]
        happened = ", ".join(map(str, interval.events))
        before = chosen[at - 1] if at else None
        # Hosts of the previous setup that this interval has lost: they explain waiting and forced changes.
        lost = set() if before in (None, self.wait) else {*self.setups[before].hosts} - {*interval.hosts}
        if option == self.wait:
            what = f"waits for {name_hosts(lost)}" if lost else "waits"
            what = what if self.figures[at] else "nothing can run"
        elif before is None:
            what = "first setup"
        elif option == before:
            what = "continues, since no change would pay off" if plans else "continues"
        elif before == self.wait:
            what = "can run again"
        elif not plans:
            what = "the same degrees with less data parallelism"
        elif lost:
            idle = len(interval.hosts) - len(self.setups[option].hosts)
            rest = f", {idle} of them idle" if idle else ""
            what = f"the fastest on the {len(interval.hosts)} remaining hosts{rest}"
        else:
            what = self._why_it_pays(at, chosen)
        return f"{happened}: {what}" if happened else what

    def _why_it_pays(self, at: int, chosen: Sequence[int]) -> str:
        """Explain the gain of a voluntary change until the next one, compared with continuing."""
        before, option = chosen[at - 1], chosen[at]
        # The gain counts until the next change, or until the previous setup could no longer have run.
        end = next((later for later in range(at, len(chosen)) if chosen[later] != option), len(chosen))
        # First interval in which the previous setup could not have run on: until then both can be compared.
        stops = next((later for later in range(at, end) if not self.choices.runs[later, before]), end)
        lost = set() if stops == end else {*self.setups[before].hosts} - {*self.course.intervals[stops].hosts}
        end = end if lost else max(stops, at + 1)  # unpriced setups are too slow, by an unknown factor
        more = self.choices.steps[at:end, option].sum() - self.choices.steps[at:end, before].sum()
        old, step_s = self.figures[at].get(before), self.figures[at][option].step_time_s
        told = [f"{predicted(step_s)} s per step instead of {predicted(old.step_time_s)} s"] if old else []
        if lost:
            from_s = self.course.intervals[stops].from_s
            told.append(f"{name_hosts(lost)} will be lost at {from_s:g} s, and changing before that loses no work")
        until_s = self.course.intervals[end - 1].to_s
        switch_s = sum(self.end_s(at, before)) + self.begin_s(at, option)
        return "; ".join([*told, f"{more:,.0f} more steps until {until_s:g} s outweigh {switch_s:.0f} s of change"])


def plan_json(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Build the JSON object of `meshtune replan`."""
    return {
        "timeline": timeline_json(problem, plan.best),
        "steps": plan.best.steps,
        "tokens": plan.best.steps * problem.setting.job.tokens_per_step,
        "gain_over_staying": plan.gain_over_staying,
        "staying": None
        if plan.staying is None
        else {"timeline": timeline_json(problem, plan.staying), "steps": plan.staying.steps},
        "until_s": plan.until_s,
        "assumptions": asdict(plan.assumptions),
        "trials": plan.num_trials,
    }


def timeline_json(problem: Problem, timeline: Timeline) -> list[dict[str, Any]]:
    """Build the JSON list of a timeline, with an object per interval."""
    return [
        {
            "from_s": one.from_s,
            "to_s": one.to_s,
            "config": None if one.setup is None else one.setup.config.values(problem.dimensions),
            "hosts": [] if one.setup is None else list(one.setup.hosts),
            "step_time_s": one.step_time_s,
            "steps": one.steps,
            "switch_s": one.switch_s,
            "lost_work_s": one.lost_work_s,
            "reason": one.reason,
        }
        for one in timeline.stretches
    ]


def robust_json(problem: Problem, choice: RobustChoice, traces: Sequence[str], statistic: str) -> dict[str, Any]:
    """Build the JSON object of `meshtune replan --robust`."""

    def told(of_traces: Sequence[OnTrace]) -> list[dict[str, Any]]:
        return [
            {"trace": name, "steps": one.steps, "time_per_token_s": _finite(one.time_per_token_s)}
            for name, one in zip(traces, of_traces, strict=True)
        ]

    # JSON has no infinity: a configuration without any step gives null.
    ratio = choice.figure_best_s / choice.figure_s if math.isfinite(choice.figure_s) else math.inf
    return {
        "config": None if choice.config is None else choice.config.values(problem.dimensions),
        "statistic": statistic,
        "time_per_token_s": _finite(choice.figure_s),
        "traces": told(choice.of_traces) if choice.config else [],
        "gain_over_staying": ratio - 1 if math.isfinite(ratio) else None,
        "staying": None
        if choice.best is None
        else {
            "config": choice.best.values(problem.dimensions),
            "time_per_token_s": _finite(choice.figure_best_s),
            "traces": told(choice.of_traces_best),
        },
        "configs": choice.num_configs,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
