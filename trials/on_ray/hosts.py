"""Ranks of trials on several hosts: one actor per bundle of a placement group, each with a warm server of ranks.

Rank r runs on host r // (ranks per host), in the order of the bundles, as the cost model places it.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from trials.backend import HostNeeds
from trials.on_ray.cluster import first_line
from trials.on_ray.local import import_ray
from trials.ranks.contract import AbstractRanks, RankSetup, RanksLostError
from trials.ranks.messages import Exit, Launch, Told
from trials.ranks.processes import LOOPBACK, START_LIMIT_S, RankProcesses

HEAR_S = 0.2
"""Time that a host waits for an event before it answers that there was none [s]. Meanwhile it takes no orders."""


REPLACE_LIMIT_S = 5
"""Time that the cluster may take to replace a lost host of a trial [s]; a free one is given at once."""


_NAMED = itertools.count()
"""Numbers in names of actors: Ray keeps a name for a while after its owner was killed."""


class _RankHost:
    """Actor on one host; its methods are those of RankProcesses."""

    def __init__(self, setup: RankSetup) -> None:
        self.ranks = RankProcesses(setup).start()

    def address(self) -> str:
        return str(import_ray().util.get_node_ip_address())

    def reserve(self, host: str) -> int:
        return self.ranks.reserve(host)

    def launch(self, launch: Launch) -> None:
        self.ranks.launch_part(launch)

    def printed(self) -> str:
        return self.ranks.printed()

    def events(self) -> list[Told | Exit]:
        return self.ranks.events(HEAR_S)

    def kill(self) -> list[Exit]:
        return self.ranks.kill()


class RayRanks(AbstractRanks):
    """Ranks on the hosts of a placement group.

    Args:
        group: Placement group of Ray with a bundle for each host.
        needs: Resources that the actor on each host takes of its bundle.
        setup: Modules and variables that ranks find ready.
        is_retry: Whether the trial has been lost once, perhaps with a host that will not return.
        name: Name of the actor that the hosts belong to; theirs are NAME/host-M.
    """

    def __init__(
        self, group: Any, needs: tuple[HostNeeds, ...], setup: RankSetup, *, is_retry: bool, name: str
    ) -> None:
        self._group, self._needs, self._setup, self._is_retry, self._name = group, needs, setup, is_retry, name
        self._ray = import_ray()
        self._hosts: list[Any] = []
        self._addresses: list[str] = []
        self._hearing: dict[Any, Any] = {}  # answers that are awaited, and whose they are
        self._of_host: dict[Any, set[int]] = {}  # the ranks that run on each host of the last launch

    def start(self) -> RayRanks:
        """Start an actor on every host."""
        if self._is_retry and not self._group.wait(REPLACE_LIMIT_S):
            raise RanksLostError(f"the cluster provided no host in place of a lost one within {REPLACE_LIMIT_S} s")
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = self._ray.remote(_RankHost)
        self._hosts = [
            kind.options(
                name=f"{self._name}/host-{next(_NAMED)}",
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                scheduling_strategy=strategy(placement_group=self._group, placement_group_bundle_index=number),
            ).remote(self._setup)
            for number, needs in enumerate(self._needs)
        ]
        try:
            self._addresses = self._ray.get([host.address.remote() for host in self._hosts], timeout=START_LIMIT_S)
        except self._ray.exceptions.RayError as error:
            self.close()
            raise RanksLostError(f"the hosts of the trial did not start: {first_line(error)}") from None
        return self

    @property
    def running(self) -> frozenset[int]:
        """Ranks whose end `events` has not reported yet."""
        return frozenset().union(*self._of_host.values())

    def launch(self, function: str, *arguments: Any, num_ranks: int, memory_limit_bytes: int | None = None) -> None:
        """Start the ranks, filling host after host; a proxy job leaves the last hosts idle."""
        assert not self.running, "one trial after the other"
        sizes = [needs.num_ranks for needs in self._needs]
        assert num_ranks <= sum(sizes), "the hosts have room for all ranks"
        first = LOOPBACK if len(set(self._addresses)) == 1 else self._addresses[0]
        (port,) = self._get_answers([self._hosts[0].reserve.remote(first)])
        launched, begin = [], 0
        for host, size in zip(self._hosts, sizes, strict=True):
            ranks = tuple(range(begin, min(begin + size, num_ranks)))
            begin += len(ranks)
            if not ranks:
                break
            self._of_host[host] = set(ranks)
            launch = Launch(
                function=function,
                arguments=arguments,
                ranks=ranks,
                world_size=num_ranks,
                host=first,
                port=port,
                memory_limit_bytes=memory_limit_bytes,
            )
            launched.append(host.launch.remote(launch))
        self._get_answers(launched)

    def events(self, timeout_s: float) -> list[Told | Exit]:
        """Return the events on all hosts, waiting up to `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        found: list[Told | Exit] = []
        while self.running and not found:
            for host, ranks in self._of_host.items():
                if ranks and host not in self._hearing.values():
                    self._hearing[host.events.remote()] = host
            left_s = max(deadline_s - time.monotonic(), 0.0)
            ready, _ = self._ray.wait(list(self._hearing), num_returns=1, timeout=left_s)
            for answer in ready:
                host = self._hearing.pop(answer)
                (events,) = self._get_answers([answer])
                self._of_host[host] -= {event.rank for event in events if isinstance(event, Exit)}
                found += events
            if time.monotonic() >= deadline_s:
                break
        return found

    def printed(self) -> str:
        """Return the end of what the ranks of the last launch have printed, host after host."""
        return "".join(self._get_answers([host.printed.remote() for host in self._of_host]))

    def _get_answers(self, references: list[Any]) -> list[Any]:
        """Return the values of Ray references; a lost host raises RanksLostError."""
        try:
            return list(self._ray.get(references, timeout=START_LIMIT_S))
        except self._ray.exceptions.RayError as error:
            raise RanksLostError(f"a host of the trial is lost: {first_line(error)}") from None

    def kill(self) -> list[Exit]:
        """Kill the ranks of all hosts, and return their exits."""
        self._hearing.clear()
        killed = [host.kill.remote() for host, ranks in self._of_host.items() if ranks]
        for ranks in self._of_host.values():  # also those of a lost host, which then is lost to the next launch too
            ranks.clear()
        return [end for host in self._get_answers(killed) for end in host]

    def close(self) -> None:
        """Kill the actors, and with each its ranks."""
        for host in self._hosts:
            self._ray.kill(host, no_restart=True)
        self._hosts, self._addresses = [], []
        self._hearing.clear()
        self._of_host.clear()
