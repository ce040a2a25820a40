"""Parts of the meaning of trials that several subjects describe alike."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hardware.cluster import Cluster


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster's fields, without those that only a trace changes, and without what it has not.

    So studies from before there were switches, or domains of several hosts, keep their meaning.
    """
    assert not cluster.slow_pairs, "a study describes the cluster while nothing has changed"
    assert not cluster.networks, "a study describes the cluster while nothing has changed"
    described = asdict(cluster)
    left_out = {"slow_pairs", "networks"}
    left_out |= set() if cluster.switches else {"switches", "uplink_bytes_per_s"}
    left_out |= set() if cluster.domains else {"domains"}
    if cluster.num_domains == cluster.num_hosts:
        for group in described["groups"]:
            del group["hosts_per_domain"]
    return {key: value for key, value in described.items() if key not in left_out}
