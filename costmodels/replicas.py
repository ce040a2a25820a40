"""Which data parallel replicas of a configuration are alike, so that one of them stands for all.

The ranks of one replica on one stage are a cell. Cells are alike where they stand on the same kinds of hosts and cross
these in the same places; replicas are alike where their cells are, on every stage, and they run as many micro-batches.

Letters: p stages, r replicas, c ranks of a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.parallel import IntArray, ParallelConfig
from hardware.cluster import Cluster
from hardware.distinct import distinct_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReplicaKind:
    """Replicas that are alike.

    Attributes:
        first: Number of the first of them.
        count: How many they are.
        micro_batches: What each of them runs in a step.
        devices: The kinds of devices of its cells, as numbers of `cluster.devices`, of every stage.
    """

    first: int
    count: int
    micro_batches: int
    devices: tuple[tuple[int, ...], ...]


def replica_kinds(
    cluster: Cluster, config: ParallelConfig, ranks: IntArray, micro_batches: IntArray
) -> tuple[ReplicaKind, ...]:
    """The kinds of replicas, in the order of their first ones.

    Args:
        cluster: Where.
        config: The configuration.
        ranks: The rank of the cluster that stands for each rank of the configuration [devices].
        micro_batches: What each replica runs in a step [r].
    """
    cells = ranks.reshape(config.pp, config.dp, -1)
    hosts = cluster.rank_host()[cells]
    device, host_kind = cluster.rank_device_index()[cells], cluster.rank_host_kind()[cells]
    inside = hosts - hosts.min(axis=2, keepdims=True)  # tells where a cell crosses hosts
    moves = hosts[1:, :, 0] != hosts[:-1, :, 0]
    columns = [
        *inside.swapaxes(0, 1).reshape(config.dp, -1).T,
        *host_kind.swapaxes(0, 1).reshape(config.dp, -1).T,
        *moves.astype(np.int64),
        micro_batches,
    ]
    first, kind = distinct_rows([np.asarray(column, dtype=np.int64) for column in columns])
    counts = np.bincount(kind)
    found = [
        ReplicaKind(
            first=int(at),
            count=int(counts[number]),
            micro_batches=int(micro_batches[at]),
            devices=tuple(tuple(np.unique(device[stage, at]).tolist()) for stage in range(config.pp)),
        )
        for number, at in enumerate(first.tolist())
    ]
    return tuple(sorted(found, key=lambda one: one.first))
