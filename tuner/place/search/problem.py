"""Placement problem as tables: what branch and bound, the baselines and the checks of answers all read.

A task is a gang of modules that run together, most often one module alone. It holds all cells of its modules from its
start to its end. A cell is the smallest part of a host that modules may get. Modules of one unit have the same cells.

A gang whose modules are on S different sets takes (sum of the sets' times + (M - 1) * the longest) / M, the time of a
pipeline of S stages and M micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), where M is the least
number of micro-batches of its modules. Modules of a gang on the same set work in turn and add up. Embeddings between
two sets are a stage of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.place.options import WHOLE, Option, Pool, SetKind, kinds_of, options_of, pools_of
from tuner.place.transfers import broadcast_weights_s, latency_s, local_bytes_per_s, reshard_weights_s, send_s
from tuner.place.workload import EMBEDDINGS, TRAIN, WEIGHTS, Edge, Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """Tables of a workload.

    Attributes:
        workload: Workload.
        pools: Pools of equal hosts.
        kinds: Family of device sets.
        options: Options of each unit, at the position of its owner.
        tasks: Modules of each task.
        task_of: Task of each module.
        unit_of: Unit of each module.
        place_in_unit: Position of each module in the times of its unit's options.
        units_of: Units of each task, in the order of the flow.
        before: Tasks that each task waits for, with the edges between them.
        pool_of_cell: Pool of each cell.
        host_of_cell: Host of each cell.
        hosts: Pool, first cell and end of the cells of each host.
    """

    workload: Workload
    pools: tuple[Pool, ...]
    kinds: tuple[SetKind, ...]
    options: tuple[tuple[Option, ...], ...]
    tasks: tuple[tuple[int, ...], ...]
    task_of: tuple[int, ...]
    unit_of: tuple[int, ...]
    place_in_unit: tuple[int, ...]
    units_of: tuple[tuple[int, ...], ...]
    before: tuple[tuple[tuple[int, Edge], ...], ...]
    pool_of_cell: tuple[int, ...]
    host_of_cell: tuple[int, ...]
    hosts: tuple[tuple[int, int, int], ...]

    @property
    def num_cells(self) -> int:
        """Number of cells of the cluster."""
        return len(self.pool_of_cell)

    @property
    def units(self) -> tuple[int, ...]:
        """Positions of the modules that own a unit."""
        return tuple(sorted(set(self.unit_of)))

    @property
    def whole(self) -> int:
        """All cells of the cluster, as bits."""
        return (1 << self.num_cells) - 1

    def cells_of_hosts(self, pool: int, hosts: range) -> int:
        """Return the cells of some hosts of a pool, counted from the pool's first, as bits."""
        first = sum(one.hosts for one in self.pools[:pool])
        wanted = {first + host for host in hosts}
        return sum(1 << cell for cell, host in enumerate(self.host_of_cell) if host in wanted)

    def module_time_s(self, module: int, option: Option) -> float:
        """Return the time of a module under its unit's option [s]."""
        return option.times_s[self.place_in_unit[module]]

    def task_time_s(self, task: int, chosen: dict[int, Option], where: dict[int, int]) -> float:
        """Return the time of a task whose units all have their options and cells [s]."""
        members = self.tasks[task]
        if len(members) == 1:
            return self.module_time_s(members[0], chosen[self.unit_of[members[0]]])
        stages: dict[int, float] = {}
        for module in members:
            unit = self.unit_of[module]
            stages[where[unit]] = stages.get(where[unit], 0.0) + self.module_time_s(module, chosen[unit])
        times = list(stages.values())
        for edge in self.workload.edges:
            if edge.sends == EMBEDDINGS and self.task_of[edge.source] == task:
                source, target = self.unit_of[edge.source], self.unit_of[edge.target]
                seconds = self.edge_s(edge, chosen[source], where[source], chosen[target], where[target])
                # gradients of the embeddings come back to what trains
                times.append(seconds * (2 if self.workload.modules[edge.source].job == TRAIN else 1))
        count = min(chosen[self.unit_of[module]].layout.micro_batches for module in members)
        return (sum(times) + (count - 1) * max(times)) / count

    def edge_s(self, edge: Edge, source: Option, source_cells: int, target: Option, target_cells: int) -> float:
        """Return the time of sending the data of an edge between two sets of devices [s]; 0 if they are the same."""
        if source_cells == target_cells:
            return 0.0
        cluster = self.workload.cluster
        if self._in_one_domain(source_cells | target_cells):
            together = min(source.kind.devices, target.kind.devices) * local_bytes_per_s(cluster)
            return latency_s(cluster) + edge.data_bytes / together
        return send_s(edge.data_bytes, senders=source.kind.devices, receivers=target.kind.devices, cluster=cluster)

    def weights_s(self, edge: Edge, source: Option, source_cells: int, target: Option, target_cells: int) -> float:
        """Return the time of sending an edge's weights, or of resharding them on the devices of both [s]."""
        cluster = self.workload.cluster
        if source_cells == target_cells:
            in_domain = source.layout.parts <= cluster.devices_per_domain
            return reshard_weights_s(
                edge.data_bytes,
                sender_parts=source.layout.parts,
                receiver_parts=target.layout.parts,
                in_domain=in_domain,
                cluster=cluster,
            )
        senders, parts = source.kind.devices, target.layout.parts
        return broadcast_weights_s(edge.data_bytes, senders=senders, parts=parts, cluster=cluster)

    def _in_one_domain(self, cells: int) -> bool:
        domains = self.workload.cluster.host_domain()
        return len({domains[host] for cell, host in enumerate(self.host_of_cell) if cells >> cell & 1}) == 1

    def may_have(self, unit: int, cells: int, where: dict[int, int]) -> bool:
        """Return whether a unit may have some cells beside the units that are placed.

        Modules of a gang share all of their devices, or none; so do all modules in pools.

        Args:
            unit: Unit.
            cells: Its cells, as bits.
            where: Cells of the units that are placed.
        """
        workload = self.workload
        gangs = [of_task for of_task in self.units_of if unit in of_task]
        together = [{self.unit_of[module] for module in group} for group in workload.together]
        apart = [{self.unit_of[module] for module in pair} for pair in workload.apart]
        for other, taken in where.items():
            if any(unit in group and other in group for group in together) and cells != taken:
                return False
            if {unit, other} in apart and cells & taken:
                return False
            if (workload.pools or any(other in gang for gang in gangs)) and cells != taken and cells & taken:
                return False
        return True

    def fits(self, held: int, capacity_bytes: float, chosen: dict[int, Option]) -> bool:
        """Return whether the units on one cell fit in its devices, whichever task runs.

        Args:
            held: Units on the cell, as bits.
            capacity_bytes: Memory that they may use.
            chosen: Option of each of them.
        """
        units = [unit for unit in chosen if held >> unit & 1]
        idle = {unit: chosen[unit].idle_bytes for unit in units}
        for task, of_task in enumerate(self.units_of):
            at_work = [unit for unit in units if unit in of_task]
            if not at_work:
                continue
            need = sum(idle[unit] for unit in units if unit not in at_work)
            need += sum(chosen[unit].busy_bytes for unit in at_work)
            if len(of_task) > 1:
                need += self._in_flight_bytes(task, at_work, chosen)
            if need > capacity_bytes:
                return False
        return True

    def _in_flight_bytes(self, task: int, at_work: list[int], chosen: dict[int, Option]) -> float:
        """Return the activations that the stages of a gang keep for the micro-batches in later stages [bytes].

        A stage of 1F1B keeps as many micro-batches as there are stages from it to the last.
        """
        order = self.units_of[task]
        total = 0.0
        for unit in at_work:
            later = [chosen[other].layout.config.pp for other in order[order.index(unit) + 1 :] if other in chosen]
            layout = chosen[unit].layout
            total += layout.activation_bytes * max(0, min(sum(later), layout.micro_batches - layout.config.pp))
        return total

    def same_cells(self, kind: SetKind, cells: int) -> bool:
        """Return whether a set of cells is of a kind."""
        if kind.pool == WHOLE:
            return cells == self.whole
        if kind.pool != 0 and len(self.pools) == 1:
            return False
        mine = [cell for cell in range(self.num_cells) if cells >> cell & 1]
        hosts = {self.host_of_cell[cell] for cell in mine}
        return (
            all(self.pool_of_cell[cell] == kind.pool for cell in mine)
            and len(hosts) == kind.hosts
            and len(mine) == kind.num_cells
        )


def placement_problem(workload: Workload, on_progress: Callable[[str], None] = lambda _: None) -> PlacementProblem:
    """Price a workload on its cluster."""
    pools = pools_of(workload)
    kinds = kinds_of(pools)
    return problem_of(workload, pools, kinds, options_of(workload, kinds, on_progress))


def problem_of(
    workload: Workload, pools: tuple[Pool, ...], kinds: tuple[SetKind, ...], options: tuple[tuple[Option, ...], ...]
) -> PlacementProblem:
    """Compute the tables of a workload whose options are known."""
    gangs = _in_order(workload)
    task_of = {module: task for task, members in enumerate(gangs) for module in members}
    unit_of = workload.unit_of
    place = [0] * len(unit_of)
    for unit in set(unit_of):
        others = [at for at, of in enumerate(unit_of) if of == unit and at != unit]
        for position, module in enumerate(others, start=1):
            place[module] = position
    before: list[list[tuple[int, Edge]]] = [[] for _ in gangs]
    for edge in workload.edges:
        if workload.waits_for(edge) and task_of[edge.source] != task_of[edge.target]:
            before[task_of[edge.target]].append((task_of[edge.source], edge))
    cells = [
        (number, sum(one.hosts for one in pools[:number]) + host)
        for number, pool in enumerate(pools)
        for host in range(pool.hosts)
        for _ in range(pool.cells)
    ]
    return PlacementProblem(
        workload=workload,
        pools=pools,
        kinds=kinds,
        options=options,
        tasks=gangs,
        task_of=tuple(task_of[at] for at in range(len(unit_of))),
        unit_of=unit_of,
        place_in_unit=tuple(place),
        units_of=tuple(tuple(dict.fromkeys(unit_of[at] for at in members)) for members in gangs),
        before=tuple(map(tuple, before)),
        pool_of_cell=tuple(pool for pool, _ in cells),
        host_of_cell=tuple(host for _, host in cells),
        hosts=_hosts(pools),
    )


def _hosts(pools: tuple[Pool, ...]) -> tuple[tuple[int, int, int], ...]:
    found, first = [], 0
    for number, pool in enumerate(pools):
        for _ in range(pool.hosts):
            found.append((number, first, first + pool.cells))
            first += pool.cells
    return tuple(found)


def _in_order(workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Return the gangs, senders before receivers, and the modules of each in the order in which embeddings pass."""
    gangs = [_by_flow(workload, gang) for gang in workload.gangs()]
    gang_of = {at: number for number, gang in enumerate(gangs) for at in gang}
    ordered: list[int] = []
    while len(ordered) < len(gangs):
        for number in range(len(gangs)):
            sources = {
                gang_of[edge.source]
                for edge in workload.edges
                if gang_of[edge.target] == number and edge.sends not in (WEIGHTS, EMBEDDINGS)
            } - {number}
            if number not in ordered and sources <= set(ordered):
                ordered.append(number)
    return tuple(gangs[number] for number in ordered)


def _by_flow(workload: Workload, gang: tuple[int, ...]) -> tuple[int, ...]:
    ordered: list[int] = []
    while len(ordered) < len(gang):
        ready = [
            at
            for at in gang
            if at not in ordered
            and all(edge.source in ordered for edge in workload.edges if edge.target == at and edge.sends == EMBEDDINGS)
        ]
        # a round of embeddings has no order, and is taken as it stands in the file
        ordered += ready or [at for at in gang if at not in ordered]
    return tuple(ordered)
