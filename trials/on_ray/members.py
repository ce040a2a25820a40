"""Nodes of a Ray cluster that are alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardware.io.errors import ConfigError
from trials.on_ray.cluster import first_line, join_cluster
from trials.on_ray.local import import_ray

_ACCELERATORS = ("GPU", "NPU", "TPU", "HPU", "neuron_cores")
"""Resources that Ray counts devices by (Ray 2.60 python/ray/_private/accelerators)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Node of the cluster.

    Attributes:
        address: Network address.
        node_id: Identifier that Ray gives the node; a node that is started again has another.
        cpus: Number of CPUs.
        devices: Number of accelerators.
    """

    address: str
    node_id: str
    cpus: int
    devices: int


class RayMembers:
    """Connection to a running Ray cluster that lists its nodes.

    Args:
        address: Address of the cluster, as in `join_cluster`.

    Raises:
        ConfigError: No cluster answers.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.ray: Any = import_ray()
        if not self.ray.is_initialized():
            join_cluster(self.ray, address)

    def living(self) -> tuple[Member, ...]:
        """Return the nodes that are alive.

        Raises:
            ConfigError: The cluster does not answer.
        """
        try:
            nodes = self.ray.nodes()
        except Exception as error:  # noqa: BLE001 # Ray raises errors of gRPC and of its own, which have no common base
            raise ConfigError(
                f"does not answer ({first_line(error)})", key="--hosts-from", value=f"ray at {self._address}"
            ) from None
        return tuple(
            Member(
                address=node["NodeManagerAddress"],
                node_id=node["NodeID"],
                cpus=int(node["Resources"].get("CPU", 0)),
                devices=max(int(node["Resources"].get(name, 0)) for name in _ACCELERATORS),
            )
            for node in nodes
            if node["Alive"]
        )

    def close(self) -> None:
        """Leave the cluster."""
        self.ray.shutdown()
