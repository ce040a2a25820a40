"""Loop of a watch: look at the cluster, decide, answer, and keep what stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from hardware.dynamics import HostEvent, LinkEvent, Trace
from hardware.io.errors import ConfigError
from tuner.replan.present import Present, Watched
from tuner.watch.answer import Answer, Seen, answer_of
from tuner.watch.hosts import AbstractHosts, Look, NodeHosts
from tuner.watch.policy import Decision, Rules, Standing, changed, decide, keep_accounts, next_look_s
from tuner.watch.probing import Probing
from tuner.watch.state import Kept, write_state

MOST_BESIDES = 8
"""Largest number of layouts with lost steps that are priced in a state although others are predicted faster there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What a watch does with its answers.

    Attributes:
        on_answer: Function that is given each answer. For a change it returns why the change was refused, or nothing.
        on_trouble: Function that is told once why the cluster cannot be seen.
        sleep: Function that waits for some seconds.
        every_s: Time between two looks [s].
        once: Whether to end after the first answer.
        state: File of the state.
    """

    on_answer: Callable[[Answer], str]
    on_trouble: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    every_s: float = 5.0
    once: bool = False
    state: Path


def watch_cluster(
    watched: Watched,
    hosts: AbstractHosts,
    kept: Kept,
    rules: Rules,
    doing: Doing,
    *,
    running: ParallelConfig | None = None,
    probing: Probing | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Watch a cluster until the process is ended, or for one answer.

    Args:
        watched: Study whose cluster is watched.
        hosts: Source of the cluster's states.
        kept: State of an earlier watch, or that of a new one.
        rules: Rules of the decisions.
        doing: What to do with the answers.
        running: Configuration that runs now, in place of the kept one; None takes that, or the study's best.
        probing: Probe that the hosts use, whose measurements are kept in the state; None for no probe.
        clock: Seconds since the epoch.

    Raises:
        ConfigError: The cluster cannot be seen at the first look, no configuration works, or `running` cannot run.
    """
    watch = _Watch(watched, hosts, kept, rules, doing, probing, clock)
    watch.begin(running)
    while not doing.once:
        doing.sleep(watch.pause_s())
        watch.turn()


class _Watch:
    """Watch between two looks."""

    def __init__(
        self,
        watched: Watched,
        hosts: AbstractHosts,
        kept: Kept,
        rules: Rules,
        doing: Doing,
        probing: Probing | None,
        clock: Callable[[], float],
    ) -> None:
        self._watched, self._hosts, self._kept, self._rules = watched, hosts, kept, rules
        self._doing, self._probing, self._clock = doing, probing, clock
        self._look: Look | None = None
        self._present: Present | None = None
        self._due_in_s = float("inf")
        self._trouble = self._unread = ""

    def begin(self, running: ParallelConfig | None) -> None:
        """Look for the first time, and answer in any case."""
        look = self._hosts.look()
        standing = self._kept.standing
        if standing is None or running is not None:
            setup = self._watched.best()
            if running is not None:
                present = self._watched.price(look.trace)
                setup = self._watched.place(running, present.interval)
                if setup is None:
                    raise ConfigError(
                        f"cannot run on the {len(present.hosts)} hosts that are there",
                        key="--config",
                        value=str(running),
                        nearest="leave it out to begin with the layout that this watch has named last",
                    )
            elif setup is None:
                raise ConfigError(
                    "has no configuration that works",
                    file=self._watched.prepared.request.file,
                    nearest="`meshtune space` explains why",
                )
            standing = Standing(running=setup, since_s=look.now_s, at_s=look.now_s)
            self._kept = replace(self._kept, standing=standing, ran_on=look.identities, told="")
        self._see(look, standing, is_first=True)

    def turn(self) -> None:
        """Look again, and answer if there is something new."""
        try:
            look = self._hosts.look()
        except ConfigError as error:
            if str(error) != self._trouble:
                self._doing.on_trouble(str(error))
            self._trouble = str(error)
            self._keep()
            return
        self._trouble = ""
        assert self._kept.standing is not None, "it was set at the beginning"
        self._see(look, self._kept.standing)

    def pause_s(self) -> float:
        """Return the time until the next look [s]."""
        return min(self._doing.every_s, max(self._due_in_s, 0.01))

    def _see(self, look: Look, standing: Standing, *, is_first: bool = False) -> None:
        """Price the state of a look, decide, answer, and keep the result."""
        events: Sequence[HostEvent | LinkEvent] = ()
        if self._look is None or look.trace != self._look.trace or self._present is None:
            events = _new_events(None if self._look is None else self._look.trace, look.trace)
            before = self._present
            dearest = sorted(standing.lost_steps, key=lambda one: -standing.lost_steps[one])[:MOST_BESIDES]
            besides = [*([standing.running] if standing.running is not None else []), *dearest]
            present = self._watched.price(look.trace, besides)
            if before is not None:
                standing = keep_accounts(standing, before, present.interval.from_s)
            # what the cluster did while nobody watched is not known
            standing = replace(standing, at_s=max(standing.at_s, present.interval.from_s))
            self._present = present
        self._look = look
        present = self._present
        standing = keep_accounts(standing, present, look.now_s)
        is_broken = standing.running is not None and any(
            look.identities[host] != self._kept.ran_on[host]
            for host in standing.running.hosts
            if host < len(self._kept.ran_on)
        )
        verdict = decide(standing, present, look.now_s, self._rules, is_broken=is_broken)
        seen = Seen(
            look=look,
            present=present,
            standing=standing,
            verdict=verdict,
            events=events,
            wall_s=self._clock(),
            in_training=self._in_training(),
        )
        answer = answer_of(self._watched.prepared, self._watched, seen)
        self._due_in_s = next_look_s(verdict) - look.now_s
        self._kept = replace(self._kept, standing=standing)
        is_due = verdict.decision == Decision.CHANGE and look.now_s >= standing.held_until_s
        if is_first or is_due or events or answer.short != self._kept.told:
            refused = self._doing.on_answer(answer)
            self._kept = replace(self._kept, told=answer.short)
            if verdict.decision == Decision.CHANGE and refused:
                # asked again when the state has stood once more, or when the cluster changes
                held_s = look.now_s + max(self._rules.settle_s, self._doing.every_s)
                self._doing.on_trouble(f"the change was not made: {refused}")
                self._kept = replace(self._kept, standing=replace(standing, held_until_s=held_s))
            elif verdict.decision in (Decision.CHANGE, Decision.WAIT):
                standing = changed(standing, verdict, present, look.now_s)
                self._kept = replace(self._kept, standing=standing, ran_on=look.identities)
                # what follows from the change itself is no news
                verdict = decide(standing, present, look.now_s, self._rules)
                after = replace(seen, standing=standing, verdict=verdict)
                self._kept = replace(self._kept, told=answer_of(self._watched.prepared, self._watched, after).short)
        self._keep()

    def _in_training(self) -> Mapping[str, Any] | None:
        """Return the state of the study's training; None without one, or if it cannot be read, which is told once."""
        try:
            return self._watched.prepared.request.trials.backend.in_training()
        except ConfigError as error:
            if str(error) != self._unread:
                self._doing.on_trouble(str(error))
            self._unread = str(error)
            return None

    def _keep(self) -> None:
        if isinstance(self._hosts, NodeHosts):
            self._kept = replace(self._kept, seats=self._hosts.seats, trace=Trace(events=tuple(self._hosts.events)))
        if self._probing is not None:
            self._kept = replace(self._kept, links=self._probing.links)
        write_state(self._doing.state, self._watched.prepared.request, self._kept)


def _new_events(before: Trace | None, now: Trace) -> tuple[HostEvent | LinkEvent, ...]:
    """Return the events that were added to a trace; at the first look, those of its last moment."""
    if before is None:
        last_s = now.events[-1].time_s if now.events else 0.0
        return tuple(event for event in now.events if event.time_s == last_s)
    if now.events[: len(before.events)] == before.events:
        return now.events[len(before.events) :]
    last_s = before.events[-1].time_s if before.events else 0.0
    return tuple(event for event in now.events if event.time_s > last_s)
