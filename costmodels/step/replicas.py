"""Which data parallel replicas of a configuration are alike, so that one of them stands for all.

The ranks of one replica on one stage are a cell. Cells are alike where they stand on the same kinds of hosts and cross
these in the same places; replicas are alike where their cells are, on every stage, and they run as many micro-batches.

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
        replicas: Their numbers, ascending.
        micro_batches: What each of them runs in a step.
        devices: The kinds of devices of its cells, as numbers of `cluster.devices`, of every stage.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    devices: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> int:
        """The one that is simulated."""
        return self.replicas[0]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.replicas)


def replica_kinds(cluster: Cluster, config: ParallelConfig, micro_batches: IntArray) -> tuple[ReplicaKind, ...]:
    """The kinds of replicas, in the order of their first ones.

    Args:
        cluster: Where.
        config: The configuration.
        micro_batches: What each replica runs in a step [r].
    """
    shape = (config.pp, config.dp, -1)
    hosts = cluster.rank_host().reshape(shape)
    device, host_kind = cluster.rank_device_index().reshape(shape), cluster.rank_host_kind().reshape(shape)
    inside = hosts - hosts.min(axis=2, keepdims=True)  # tells where a cell crosses hosts
    moves = hosts[1:, :, 0] != hosts[:-1, :, 0]
    columns = [
        *inside.swapaxes(0, 1).reshape(config.dp, -1).T,
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
    """Configurations of a grid, each as one kind of its replicas sees it; where all are alike, that is all of them.

    Attributes:
        at: Positions in the grid [k].
        num_micro_batches: What each of these replicas runs in a step [k].
        has_device: Whether some of their ranks stand on each of the cluster's devices, by stage [p, d]; None where
            those of all replicas count.
    """

    at: IntArray
    num_micro_batches: IntArray
    has_device: NDArray[np.bool_] | None = None


def even_rows(job: TrainingJob, grid: ConfigGrid) -> ReplicaRows:
    """All configurations of a grid whose replicas run equal numbers of micro-batches."""
    return ReplicaRows(at=np.arange(len(grid)), num_micro_batches=job.global_batch_size // (grid.dp * grid.mbs))


def replica_rows(job: TrainingJob, cluster: Cluster, grid: ConfigGrid) -> list[ReplicaRows]:
    """The same of any grid: replicas that run unequal numbers of micro-batches are told apart by their devices."""
    shares = [grid.assignments[code].micro_batches for code in grid.assignment.tolist()]
    even = even_rows(job, grid)
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
