"""Number of trials that the machines of a Ray cluster have room for, and the message if there is no room.

All resources of a machine count, also those that others use at the moment, because they may become free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hardware.io.errors import ConfigError
from trials.backend import HostNeeds

NODE_GROUP = "ray.io/node-group"
"""Label of nodes that a cluster launcher has made as members of a group, to which Ray's autoscaler may add others.
Source: Ray 2.60 python/ray/_private/resource_and_label_spec.py, from RAY_NODE_TYPE_NAME, which `ray up` and KubeRay
set.
"""


class NoRoomError(ConfigError):
    """Trial that will never find its hosts in the cluster that was joined.

    Attributes:
        fitting: Number of machines that are what one of its hosts has to be.
    """

    fitting: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Resources of one machine of a cluster.

    Attributes:
        cpus: Number of cores of the machine.
        gpus: Number of GPUs of the machine.
        may_multiply: Whether an autoscaler may add machines like this one.
    """

    cpus: int
    gpus: int
    may_multiply: bool = False

    def has(self, needs: HostNeeds) -> bool:
        """Return whether the machine has the resources that a trial needs on a host."""
        return self.cpus >= needs.cpus and self.gpus >= needs.gpus

    def times(self, needs: HostNeeds) -> int:
        """Return how many trials find these resources at once."""
        return min(
            self.cpus // needs.cpus if needs.cpus else self.gpus, self.gpus // needs.gpus if needs.gpus else self.cpus
        )


def machines_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Machine, ...]:
    """Return the machines of the nodes that are alive, as `ray.nodes()` lists them."""
    return tuple(
        Machine(
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            may_multiply=NODE_GROUP in (node.get("Labels") or {}),
        )
        for node in nodes
        if node["Alive"]
    )


def reserve_hosts(hosts: tuple[HostNeeds, ...], machines: Sequence[Machine]) -> tuple[HostNeeds, ...]:
    """Return needs that keep a second trial off the same, like hosts: more than half of the largest machine."""
    needs = hosts[0]
    fitting = [machine for machine in machines if machine.has(needs)]
    if not fitting:
        return hosts
    # a second trial would need as much again, which is then more than any machine has left
    if needs.gpus:
        kept = replace(needs, gpus=max(needs.gpus, max(machine.gpus for machine in fitting) // 2 + 1))
    else:
        kept = replace(needs, cpus=max(needs.cpus, max(machine.cpus for machine in fitting) // 2 + 1))
    return (kept,) * len(hosts)


def room_for(hosts: tuple[HostNeeds, ...], machines: Sequence[Machine]) -> int:
    """Return how many trials find all their hosts at once.

    The hosts of one trial are alike, and different machines. Several trials may share a machine.
    """
    # k trials fit if the machines together hold k hosts of each trial, where a machine holds a trial at most once
    times = [machine.times(hosts[0]) for machine in machines]
    most = sum(times) // len(hosts)
    return next((k for k in range(most, 0, -1) if sum(min(each, k) for each in times) >= k * len(hosts)), 0)


def in_words(hosts: tuple[HostNeeds, ...]) -> str:
    """Describe the needs of a trial: `one CPU`, `8 CPUs`, `1 CPU and 8 GPUs on each of 2 hosts`."""
    needs = hosts[0]
    if len(hosts) == 1 and needs == HostNeeds():
        return "one CPU"
    text = _count_in_words(needs.cpus, "CPU")
    text += f" and {_count_in_words(needs.gpus, 'GPU')}" if needs.gpus else ""
    return text if len(hosts) == 1 else f"{text} on each of {len(hosts)} hosts"


def machines_in_words(machines: Iterable[Machine]) -> str:
    """List the machines, equal ones together: `2 with 8 GPUs and 64 CPUs, 1 with 16 CPUs`."""
    counted = Counter((machine.gpus, machine.cpus) for machine in machines)
    return ", ".join(
        f"{count} with " + (f"{_count_in_words(gpus, 'GPU')} and " if gpus else "") + _count_in_words(cpus, "CPU")
        for (gpus, cpus), count in sorted(counted.items(), reverse=True)
    )


def no_room(hosts: tuple[HostNeeds, ...], machines: Sequence[Machine]) -> NoRoomError:
    """Return the error for a trial that will never find its hosts among these machines."""
    have = machines_in_words(machines) or "no machine that is alive"
    error = NoRoomError(
        f"wants {in_words(hosts)} for a trial, and the cluster that was joined can never provide that: it has {have}",
        key="cluster",
        nearest=_nearest(hosts, machines),
    )
    error.fitting = sum(machine.has(hosts[0]) for machine in machines)
    return error


def _nearest(hosts: tuple[HostNeeds, ...], machines: Sequence[Machine]) -> str:
    """Return the change that would give a trial its hosts."""
    needs, wanted = hosts[0], len(hosts)
    fitting = sum(machine.has(needs) for machine in machines)
    if needs.gpus and sum(machine.gpus >= needs.gpus for machine in machines) > fitting:
        return f"start Ray with --num-cpus={needs.cpus} or more on every host"
    if fitting:
        return f"study what is there, cluster: {{hosts: {fitting}}}, or start Ray on {wanted - fitting} more"
    most = max(((machine.gpus if needs.gpus else machine.cpus) for machine in machines), default=0)
    if not most:
        return "join a cluster that has some" if needs.gpus else "start Ray with --num-cpus"
    like = sum((machine.gpus if needs.gpus else machine.cpus) >= most for machine in machines)
    return f"study what is there, cluster: {{hosts: {min(like, wanted)}, devices_per_host: {most}}}"


def _count_in_words(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
