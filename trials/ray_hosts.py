"""The ranks of trials on several hosts: one actor per bundle of a placement group, each with a warm server of ranks.

Rank r runs on host r // (ranks per host), in the order of the bundles, as the cost model places it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trials.backend import HostNeeds
from trials.ranks import AbstractRanks, RanksLostError
from trials.ray_local import imported_ray
from trials.torch_training.rank_messages import Exit, Launch, Told
from trials.torch_training.rank_processes import END_LIMIT_S, LOOPBACK, START_LIMIT_S, RankProcesses

HEAR_S = 0.2
"""How long a host waits for an event before it answers that there was none; so long it takes no orders."""


class _RankHost:
    """The actor on one host."""

    def __init__(self) -> None:
        self.ranks = RankProcesses().start()

    def address(self) -> str:
        """Where other hosts reach this one."""
        return str(imported_ray().util.get_node_ip_address())

    def reserve(self, host: str) -> int:
        """As RankProcesses has it."""
        return self.ranks.reserve(host)

    def launch(self, launch: Launch) -> None:
        """As RankProcesses has it."""
        self.ranks.launch_part(launch)

    def events(self) -> list[Told | Exit]:
        """What has happened, or nothing yet."""
        return self.ranks.events(HEAR_S) if self.ranks.running else []

    def kill(self) -> list[Exit]:
        """As RankProcesses has it."""
        return self.ranks.kill()


class RayRanks(AbstractRanks):
    """Ranks on the hosts of a placement group.

    Args:
        group: The placement group, with a bundle for each host.
        needs: What the actor on each host takes of its bundle.
    """

    def __init__(self, group: Any, needs: tuple[HostNeeds, ...]) -> None:
        self._group, self._needs = group, needs
        self._ray = imported_ray()
        self._hosts: list[Any] = []
        self._addresses: list[str] = []
        self._hearing: dict[Any, int] = {}
        self._running: set[int] = set()

    def start(self) -> RayRanks:
        """Starts an actor on every host."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = self._ray.remote(_RankHost)
        self._hosts = [
            kind.options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                scheduling_strategy=strategy(placement_group=self._group, placement_group_bundle_index=number),
            ).remote()
            for number, needs in enumerate(self._needs)
        ]
        try:
            self._addresses = self._ray.get([host.address.remote() for host in self._hosts], timeout=START_LIMIT_S)
        except self._ray.exceptions.RayError as error:
            self.close()
            raise RanksLostError(f"the hosts of the trial did not start: {error}") from None
        return self

    @property
    def running(self) -> frozenset[int]:
        """The ranks whose end `events` has not told yet."""
        return frozenset(self._running)

    def launch(
        self,
        function: str,
        *arguments: Any,
        num_ranks: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Host after host, as many ranks on each."""
        assert not self._running, "one trial after the other"
        assert num_ranks % len(self._hosts) == 0, "hosts are alike"
        per_host = num_ranks // len(self._hosts)
        first = LOOPBACK if len(set(self._addresses)) == 1 else self._addresses[0]
        port = self._ray.get(self._hosts[0].reserve.remote(first))
        self._running = set(range(num_ranks))
        self._ray.get(
            [
                host.launch.remote(
                    Launch(
                        function=function,
                        arguments=arguments,
                        ranks=tuple(range(number * per_host, (number + 1) * per_host)),
                        world_size=num_ranks,
                        host=first,
                        port=port,
                        environment=environment or {},
                        memory_limit_bytes=memory_limit_bytes,
                        log=Path("/tmp") / log.name,  # noqa: S108 # hosts share no folder of the driver's making
                    )
                )
                for number, host in enumerate(self._hosts)
            ]
        )

    def events(self, timeout_s: float) -> list[Told | Exit]:
        """What has happened on any host."""
        deadline_s = time.monotonic() + timeout_s
        found: list[Told | Exit] = []
        while self._running and not found:
            for number, host in enumerate(self._hosts):
                if number not in self._hearing.values():
                    self._hearing[host.events.remote()] = number
            left_s = max(deadline_s - time.monotonic(), 0.0)
            ready, _ = self._ray.wait(list(self._hearing), num_returns=1, timeout=left_s)
            for answer in ready:
                del self._hearing[answer]
                found += self._heard(answer)
            if time.monotonic() >= deadline_s:
                break
        return found

    def _heard(self, answer: Any) -> list[Told | Exit]:
        try:
            events: list[Told | Exit] = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            raise RanksLostError(f"a host of the trial is lost: {str(error).splitlines()[0]}") from None
        self._running -= {event.rank for event in events if isinstance(event, Exit)}
        return events

    def kill(self) -> list[Exit]:
        """Ends the ranks of all hosts."""
        if not self._running:
            return []
        try:
            self._hearing.clear()
            ends = self._ray.get([host.kill.remote() for host in self._hosts], timeout=2 * END_LIMIT_S)
        except self._ray.exceptions.RayError as error:
            raise RanksLostError(f"a host of the trial is lost: {str(error).splitlines()[0]}") from None
        self._running.clear()
        return [end for host in ends for end in host]

    def close(self) -> None:
        """Ends the actors, and with each its ranks."""
        for host in self._hosts:
            self._ray.kill(host, no_restart=True)
        self._hosts, self._addresses = [], []
        self._hearing.clear()
        self._running.clear()
