"""Group the data parallel replicas of a configuration into kinds of equal replicas, of which one stands for all.

The ranks of one replica on one stage are a cell. Cells are alike if they stand on the same kinds of hosts and cross
hosts in the same places. Replicas are alike if their cells are alike on every stage, and if they run equal numbers of
micro-batches.

Letters: p stages, r replicas, d kinds of devices, k rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from hardware.distinct import distinct_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplicaKind:
    """Replicas that are alike.

    Attributes:
        replicas: Numbers of the replicas, ascending.
        micro_batches: Number of micro-batches that each of them runs in a step.
        devices: Kinds of devices of its cell on every stage, as numbers of `cluster.devices`.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    devices: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> int:
        """Number of the replica that is simulated."""
        return self.replicas[0]

    @property
    def count(self) -> int:
        """Number of replicas of this kind."""
        return len(self.replicas)


def replica_kinds(cluster: Cluster, config: ParallelConfig, micro_batches: IntArray) -> tuple[ReplicaKind, ...]:
    """Return the kinds of replicas, in the order of their first ones.

    Args:
        cluster: Cluster on which the configuration runs.
        config: Configuration with its degrees.
        micro_batches: Number of micro-batches of each replica in a step [r].
    """
    shape = (config.pp, config.dp, -1)
    hosts, domains = cluster.rank_host().reshape(shape), cluster.rank_domain().reshape(shape)
    device, host_kind = cluster.rank_device_index().reshape(shape), cluster.rank_host_kind().reshape(shape)
    # shows where a cell crosses hosts and domains
    inside = [places - places.min(axis=2, keepdims=True) for places in (hosts, domains)]
    moves = domains[1:, :, 0] != domains[:-1, :, 0]
    # Replicas are alike if these columns are: places inside the cells, kinds of hosts, hops that leave a domain, and
    # work.
    columns = [
        *np.stack(inside).swapaxes(0, 2).reshape(config.dp, -1).T,
        *host_kind.swapaxes(0, 1).reshape(config.dp, -1).T,
        *moves.astype(np.int64),
        micro_batches,
    ]
    _, kind = distinct_rows([np.asarray(column, dtype=np.int64) for column in columns])
    found = []
    for number in dict.fromkeys(kind.tolist()):
        replicas = np.flatnonzero(kind == number)
        devices = device[:, replicas[0]]
        found.append(
            ReplicaKind(
                replicas=tuple(replicas.tolist()),
                micro_batches=int(micro_batches[replicas[0]]),
                devices=tuple(tuple(np.unique(of_stage).tolist()) for of_stage in devices),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplicaRows:
    """Configurations of a grid, each as one kind of its replicas sees it, or as all replicas do if they are alike.

    Attributes:
        at: Positions in the grid [k].
        num_micro_batches: Number of micro-batches that each of these replicas runs in a step [k].
        has_device: Whether some of their ranks stand on each of the cluster's devices, by stage [p, d]. None counts the
            devices of all replicas.
    """

    at: IntArray
    num_micro_batches: IntArray
    has_device: NDArray[np.bool_] | None = None


def even_rows(job: TrainingJob, grid: ConfigGrid) -> ReplicaRows:
    """Return all configurations of a grid whose replicas run equal numbers of micro-batches."""
    return ReplicaRows(at=np.arange(len(grid)), num_micro_batches=job.global_batch_size // (grid.dp * grid.mbs))


def replica_rows(job: TrainingJob, cluster: Cluster, grid: ConfigGrid) -> list[ReplicaRows]:
    """Return the rows of any grid; replicas with unequal numbers of micro-batches are grouped by their devices."""
    shares = [grid.assignments[code].micro_batches for code in grid.assignment.tolist()]
    even = even_rows(job, grid)
    # Configurations with equal shares are one batch. The others are batched by the devices of their replicas' stages.
    plain = np.flatnonzero([not share for share in shares])
    found = [ReplicaRows(at=plain, num_micro_batches=even.num_micro_batches[plain])] if len(plain) else []
    unlike: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = {}
    for position, share in enumerate(shares):
        if share:
            for kind in replica_kinds(cluster, grid.config(position), np.array(share)):
                unlike.setdefault(kind.devices, []).append((position, kind.micro_batches))
    for devices, rows in unlike.items():
        at, micro_batches = np.array(rows).T
        has_device = np.array([[number in own for number in range(len(cluster.devices))] for own in devices])
        found.append(ReplicaRows(at=at, num_micro_batches=micro_batches, has_device=has_device))
    return found
