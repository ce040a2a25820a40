"""Uneven work: which stage holds how many layers, which replica runs how many micro-batches, on which hosts.

An empty field is the runtime's own way: layers and micro-batches in equal shares, hosts in the cluster's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.parallel import IntArray
from hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What belongs to a configuration beside its degrees on unlike devices, or where stages are unlike.

    Attributes:
        layers: Layers of each virtual stage, in the order of the model [pp * vpp].
        recomputed: Layers of each virtual stage that the backward pass runs again in full [pp * vpp]; the others do as
            the configuration's `recompute` says.
        micro_batches: Micro-batches of each data parallel replica [dp].
        hosts: The cluster's hosts in the order in which ranks count them [hosts].
    """

    layers: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.layers or self.recomputed or self.micro_batches or self.hosts)

    def ranks(self, cluster: Cluster) -> IntArray:
        """The rank of the cluster that stands for each rank of the configuration [devices]."""
        if not self.hosts:
            return np.arange(cluster.num_devices)
        host = cluster.rank_host()
        return np.concatenate([np.flatnonzero(host == number) for number in self.hosts])


EVEN = Assignment()
"""Everything in equal shares."""
