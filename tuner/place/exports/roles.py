"""Roles of RL post-training: which module is the actor, the rollout, the reference, the critic and the reward model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from hardware.launched_hosts import launched_numbers
from tuner.place.options import Option
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import State, bits_of, options_chosen
from tuner.place.workload import GENERATE, TRAIN, WEIGHTS, Generation, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Keys of a framework.

    Attributes:
        lines: Arguments, one a line.
        notes: What the framework cannot express, or the user has to add.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A module in a role of RL post-training.

    Attributes:
        name: Name of the module.
        option: Option of its unit.
        cells: Cells of its unit, as bits.
        nodes: Number of hosts, and devices on each; None if hosts give unequal numbers.
        mini_batch: Sequences of one optimizer step.
        generation: Lengths, if it generates.
        memory_share: Share of its devices' memory that the others on them leave while it runs.
    """

    name: str
    option: Option
    cells: int
    nodes: tuple[int, int] | None
    mini_batch: int
    generation: Generation | None
    memory_share: float

    @property
    def config(self) -> ParallelConfig:
        """Layout."""
        return self.option.layout.config


def roles_of(workload: Workload) -> dict[str, int]:
    """Return the modules in the roles of RL post-training; none without an actor that sends weights to a generator.

    The actor sends weights to the module that generates. Of the other modules, the one that trains is the critic, the
    one that infers with the actor's model is the reference, and the last one is the reward model.
    """
    modules = workload.modules
    sending = {edge.source: edge.target for edge in workload.edges if edge.sends == WEIGHTS}
    actor = next((source for source, target in sending.items() if modules[target].job == GENERATE), None)
    if actor is None:
        return {}
    found = {"actor": actor, "rollout": sending[actor]}
    for unit, module in enumerate(modules):
        if module.shares is not None or unit in found.values() or module.job == GENERATE:
            continue
        if module.job == TRAIN:
            role = "critic"
        elif module.model == modules[actor].model and "rew" not in module.name and "reference" not in found:
            role = "reference"
        else:
            role = "reward"
        found.setdefault(role, unit)
    return found


def placed_roles(problem: PlacementProblem, state: State) -> dict[str, Role]:
    """Return each role with its place and layout."""
    modules = problem.workload.modules
    chosen = options_chosen(problem, state)
    return {
        role: Role(
            name=modules[unit].name,
            option=chosen[unit],
            cells=state.where[unit],
            nodes=_nodes(problem, state.where[unit]),
            mini_batch=modules[unit].training.global_batch_size,
            generation=modules[unit].generation,
            memory_share=_memory_share(problem, state, unit),
        )
        for role, unit in roles_of(problem.workload).items()
    }


def _nodes(problem: PlacementProblem, cells: int) -> tuple[int, int] | None:
    devices: dict[int, int] = {}
    for cell in bits_of(cells):
        host = problem.host_of_cell[cell]
        devices[host] = devices.get(host, 0) + problem.pools[problem.pool_of_cell[cell]].devices
    # a host may be a rack, of which a launcher starts the hosts
    cluster = problem.workload.cluster
    of_host, nodes, counts = np.bincount(cluster.rank_host()), 0, set()
    for host, count in devices.items():
        started = int(of_host[host]) // len(launched_numbers(cluster, (host,)))
        on_each = count if count <= started else math.gcd(count, started)
        nodes += count // on_each
        counts.add(on_each)
    return (nodes, counts.pop()) if len(counts) == 1 else None


def _memory_share(problem: PlacementProblem, state: State, unit: int) -> float:
    """Return the share of the fullest device's memory that other units leave to one while it runs."""
    chosen = options_chosen(problem, state)
    shares = []
    for cell in bits_of(state.where[unit]):
        room_bytes = problem.pools[problem.pool_of_cell[cell]].capacity_bytes
        idle_bytes = sum(
            option.idle_bytes for other, option in chosen.items() if other != unit and state.held[cell] >> other & 1
        )
        shares.append((1 - problem.workload.headroom) * (1 - idle_bytes / room_bytes))
    return min(shares)
