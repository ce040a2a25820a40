"""Options of each unit: a kind of device set, a layout on it, and whether its states leave the devices between runs.

Hosts of one group are interchangeable here: times of k hosts are those of the first k of the group, which matters under
leaf switches only. The family of device sets: k whole hosts of one group, where k is a power of two, a divisor of the
group's hosts, half of them, or what one of these leaves; all hosts of the cluster; and, of a single host, a power of
two of its devices.

States that leave the devices are copied over the host link at the rate that copies of pinned memory reach
(`costmodels.step.weights.offload`): weights before a forward pass; weights and optimizer states before training, and
back after it. A generator that is sent new weights after every step copies nothing. If everything else waits for it, it
needs no memory but while it runs; else its weights stay on the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodels.step.weights.offload import host_rates
from hardware.cluster import Cluster
from tuner.place.generation import generation_layouts
from tuner.place.layouts import Layout, layouts_of
from tuner.place.workload import GENERATE, TRAIN, WEIGHTS, Module, Workload
from tuner.space.dimensions import divisors

MOST_CELLS = 64
"""Most parts into which the devices of a cluster are divided; above, hosts are divided less."""

WHOLE = -1
"""Number of the pool that stands for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Equal hosts of one group of the cluster.

    Attributes:
        hosts: Number of hosts.
        cells: Equal parts of each host that modules may get.
        devices: Devices of each part.
        capacity_bytes: Memory of a device that modules may use, the headroom taken off.
        weight: Worth of a second of a device in the lower bound, relative to the other pools' (their peaks).
    """

    hosts: int
    cells: int
    devices: int
    capacity_bytes: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SetKind:
    """Kind of device set.

    Attributes:
        pool: Number of its pool, or WHOLE.
        hosts: Number of hosts.
        cells: Parts of each of these hosts.
        devices: Number of devices of all of them.
    """

    pool: int
    hosts: int
    cells: int
    devices: int

    @property
    def num_cells(self) -> int:
        """Number of parts of hosts in the set; not for the whole cluster."""
        return self.hosts * self.cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to place a unit.

    Attributes:
        kind: Kind of device set.
        layout: Layout on it.
        leaves: Whether its states leave the devices while others run.
        times_s: Time of each module of the unit, moves included [s].
        moves_s: Part of it that moves states from and to the host [s].
        idle_bytes: Memory of a device while others run.
        busy_bytes: Memory of a device while the unit runs.
    """

    kind: SetKind
    layout: Layout
    leaves: bool
    times_s: tuple[float, ...]
    moves_s: tuple[float, ...]
    idle_bytes: float
    busy_bytes: float


def pools_of(workload: Workload) -> tuple[Pool, ...]:
    """Divide the cluster into pools of equal hosts, and its hosts into parts."""
    pools = []
    largest = max(group.device.peak_flop_per_s("bf16") for group in workload.cluster.groups)
    for group in workload.cluster.groups:
        cells = group.devices_per_host
        while cells > 1 and (cells * workload.cluster.num_hosts > MOST_CELLS or group.devices_per_host % cells):
            cells -= 1
        pools.append(
            Pool(
                hosts=group.hosts,
                cells=cells,
                devices=group.devices_per_host // cells,
                capacity_bytes=(1 - workload.headroom) * group.device.memory_bytes,
                weight=group.device.peak_flop_per_s("bf16") / largest,
            )
        )
    return tuple(pools)


def kinds_of(pools: tuple[Pool, ...]) -> tuple[SetKind, ...]:
    """Return the family of device sets, the largest first."""
    found = []
    for number, pool in enumerate(pools):
        of_host = pool.cells * pool.devices
        powers = {1 << bit for bit in range(pool.hosts.bit_length())}
        sizes = {size for size in powers | {*divisors(pool.hosts)} | {pool.hosts // 2} if 0 < size <= pool.hosts}
        sizes |= {pool.hosts - size for size in sizes if size < pool.hosts}
        found += [SetKind(pool=number, hosts=size, cells=pool.cells, devices=size * of_host) for size in sizes]
        found += [
            SetKind(pool=number, hosts=1, cells=cells, devices=cells * pool.devices)
            for cells in divisors(pool.cells)
            if cells < pool.cells and cells & (cells - 1) == 0
        ]
    if len(pools) > 1:
        devices = sum(pool.hosts * pool.cells * pool.devices for pool in pools)
        found.append(SetKind(pool=WHOLE, hosts=sum(pool.hosts for pool in pools), cells=0, devices=devices))
    return tuple(sorted(found, key=lambda kind: (-kind.devices, kind.pool)))


def cluster_of(cluster: Cluster, kind: SetKind) -> Cluster:
    """Return the devices of a kind as a cluster."""
    if kind.pool == WHOLE:
        return cluster
    group = cluster.groups[kind.pool]
    before = sum(one.hosts for one in cluster.groups[: kind.pool])
    per_host = kind.devices // kind.hosts
    return replace(
        cluster,
        groups=(replace(group, hosts=kind.hosts, devices_per_host=per_host),),
        inter_group_links=(),
        slow_pairs=(),
        networks=(),
        switches=cluster.switches[before : before + kind.hosts],
        domains=(),
    )


def options_of(
    workload: Workload, kinds: tuple[SetKind, ...], on_progress: Callable[[str], None]
) -> tuple[tuple[Option, ...], ...]:
    """Return the options of every unit, by the position of the module that owns it; none for other modules.

    Args:
        workload: Workload.
        kinds: Family of device sets.
        on_progress: Function that is told what takes seconds.
    """
    known: dict[object, tuple[Layout, ...]] = {}
    found: list[tuple[Option, ...]] = []
    for unit, owner in enumerate(workload.modules):
        if workload.unit_of[unit] != unit:
            found.append(())
            continue
        members = tuple(workload.modules[at] for at, of in enumerate(workload.unit_of) if of == unit)
        members = (owner, *(member for member in members if member is not owner))
        on_progress(f"pricing {owner.name} on {len(kinds)} kinds of device sets")
        options: list[Option] = []
        for kind in kinds:
            if owner.devices not in (None, kind.devices):
                continue
            cluster = cluster_of(workload.cluster, kind)
            key = (*(_priced_by(member) for member in members), cluster)
            if key not in known:
                known[key] = _layouts(members, cluster, workload.headroom)
            for layout in known[key]:
                options += _options(workload, unit, members, kind, layout, cluster)
        found.append(tuple(options))
    return tuple(found)


def _priced_by(module: Module) -> Module:
    """Return the module without what does not change its times."""
    return replace(module, name="", devices=None, shares=None)


def _layouts(members: tuple[Module, ...], cluster: Cluster, headroom: float) -> tuple[Layout, ...]:
    if members[0].job == GENERATE:
        return generation_layouts(members[0], cluster, headroom)
    return layouts_of(members, cluster, headroom)


def _options(
    workload: Workload, unit: int, members: tuple[Module, ...], kind: SetKind, layout: Layout, cluster: Cluster
) -> list[Option]:
    """Return a layout with states that stay and, where that can help, with states that leave."""
    stays = Option(
        kind=kind,
        layout=layout,
        leaves=False,
        times_s=layout.times_s,
        moves_s=(0.0,) * len(members),
        idle_bytes=layout.state_bytes,
        busy_bytes=layout.busy_bytes,
    )
    if _gets_weights(workload, unit):
        # weights arrive after the step before: what else runs first finds them on the devices
        return [replace(stays, leaves=True, idle_bytes=0.0) if _runs_first(workload, unit) else stays]
    rate = min(float(host_rates(cluster, device).copy_bytes_per_s) for device in cluster.devices)
    moves = tuple((2 * layout.moved_bytes if member.job == TRAIN else layout.weight_bytes) / rate for member in members)
    times = tuple(own + moved for own, moved in zip(layout.times_s, moves, strict=True))
    return [stays, replace(stays, leaves=True, times_s=times, moves_s=moves, idle_bytes=0.0)]


def _gets_weights(workload: Workload, unit: int) -> bool:
    """Return whether a module generates with weights that are sent in every step."""
    gets = any(edge.target == unit and edge.sends == WEIGHTS for edge in workload.edges)
    return workload.modules[unit].job == GENERATE and gets


def _runs_first(workload: Workload, unit: int) -> bool:
    """Return whether all other modules wait for one, directly or not."""
    after = {unit}
    for _ in workload.modules:
        after |= {edge.target for edge in workload.edges if workload.waits_for(edge) and edge.source in after}
        # modules of a gang run together
        after |= {at for gang in workload.gangs() if after & set(gang) for at in gang}
    return after == set(range(len(workload.modules)))
