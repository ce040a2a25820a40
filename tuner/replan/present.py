"""Setups that can run on the cluster in its present state, and what a change of setup costs and gains now.

A plan (`replanning.py`) looks at a whole trace. A job that runs knows the events until now only. This module prices the
present state with the same candidates, corrections and assumed costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster import Cluster
from hardware.dynamics import Interval, Trace
from tuner.answers.best import best_known
from tuner.forecast.prepared import Prepared
from tuner.replan.cluster_states import Course, Figures, Hosts, Pricing, Setup, fastest_hosts, options_over
from tuner.replan.replanning import Assumptions, course_of, find_stored
from tuner.space.enumeration import launchable


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Present:
    """Present state of a cluster, with the setups that can run.

    Attributes:
        interval: Interval of the trace that lasts now; its beginning is the time of the last change.
        figures: Expected figures of each setup that can run.
        num_trials: Number of the study's trials that corrected the predictions.
    """

    interval: Interval
    figures: Mapping[Setup, Figures]
    num_trials: int

    @property
    def hosts(self) -> Hosts:
        """Hosts that are available."""
        return self.interval.hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Change from what runs to another setup.

    Attributes:
        setup: Setup that begins.
        switch_s: Time to write a checkpoint, restart and read the checkpoint [s].
        lost_work_s: Work lost with a host [s].
        cost_steps: Steps that the change costs: its times, in steps of the setup that ends or begins.
        gain_steps_per_s: Steps per second that the setup makes more than what runs [1/s].
    """

    setup: Setup
    switch_s: float
    lost_work_s: float
    cost_steps: float
    gain_steps_per_s: float

    @property
    def pays_after_s(self) -> float:
        """Time after which the gain has repaid the cost [s]; inf if it never does."""
        return self.cost_steps / self.gain_steps_per_s if self.gain_steps_per_s > 0 else math.inf


class Watched:
    """Study whose cluster is watched: prices one state of the cluster after the other."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self._pricing = prepared, Pricing(prepared)

    def price(self, trace: Trace, besides: Iterable[Setup] = ()) -> Present:
        """Price the state of the cluster after the last event of a trace.

        Args:
            trace: Events until now.
            besides: Setups to price in addition to those predicted to be fast, where they can run.

        Raises:
            ConfigError: The study file contradicts the stored study.
        """
        last = course_of(self.prepared.problem, trace, None).intervals[-1]
        course = Course(trace=trace, intervals=(last,))
        options = options_over(self._pricing, [course], list(besides), find_stored(self.prepared.request))
        figures = {options.setups[option]: one for option, one in options.figures[0][0].items()}
        return Present(interval=last, figures=figures, num_trials=options.num_trials)

    def best(self) -> Setup | None:
        """Return the study's best configuration on all hosts; None if no configuration works."""
        found = best_known(self.prepared, find_stored(self.prepared.request))
        return None if found is None else Setup(hosts=self._pricing.all_hosts, config=found.config)

    def base(self, hosts: Hosts) -> Cluster:
        """Return the cluster that some hosts form nominally."""
        return self._pricing.base(hosts)

    def place(self, config: ParallelConfig, interval: Interval) -> Setup | None:
        """Place a configuration on the fastest hosts of an interval; None if no number of hosts suits it."""
        for count in range(len(interval.hosts), 0, -1):
            hosts = fastest_hosts(interval, count)
            base = self._pricing.base(hosts)
            if base.num_devices == config.num_devices and launchable(
                replace(self.prepared.problem.setting, cluster=base), config
            ):
                return Setup(hosts=hosts, config=config)
        return None


def change_to(
    setup: Setup,
    present: Present,
    running: Setup | None,
    before: Figures | None,
    *,
    ran_s: float,
    costs: Assumptions,
    is_broken: bool = False,
) -> Change:
    """Compute cost and gain of changing to a setup now.

    Args:
        setup: Setup that begins; it can run now.
        present: Present state of the cluster.
        running: Setup that runs, or ran until now; None if the job waits.
        before: Figures of the running setup before the cluster changed, for one that cannot run now.
        ran_s: Time for which the running setup has run [s].
        costs: Assumed costs of a change.
        is_broken: Whether the processes of the running setup were lost with a host that is there again.
    """
    begins = present.figures[setup]
    begin_s = costs.begin_s(begins)
    cost_steps, gain_steps_per_s = begin_s / begins.step_time_s, 1 / begins.step_time_s
    saved_s = lost_s = 0.0
    ends = present.figures.get(running, before) if running is not None else None
    if running is not None and ends is not None:
        is_whole = {*present.hosts} >= {*running.hosts} and not is_broken
        saved_s, lost_s = costs.end_s(ends, ran_s=ran_s, is_whole=is_whole)
        cost_steps += (saved_s + lost_s) / ends.step_time_s
        gain_steps_per_s -= 1 / ends.step_time_s if is_whole and running in present.figures else 0.0
    return Change(
        setup=setup,
        switch_s=begin_s + saved_s,
        lost_work_s=lost_s,
        cost_steps=cost_steps,
        gain_steps_per_s=gain_steps_per_s,
    )
