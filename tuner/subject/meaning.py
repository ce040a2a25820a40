"""Parts of the meaning of trials that several subjects describe alike."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hardware.cluster import Cluster


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster's fields, without those that only a trace changes, and without switches if it has none."""
    assert not cluster.slow_pairs, "a study describes the cluster while nothing has changed"
    assert not cluster.networks, "a study describes the cluster while nothing has changed"
    left_out = {"slow_pairs", "networks", "domains"} | (
        set() if cluster.switches else {"switches", "uplink_bytes_per_s"}
    )
    told = {key: value for key, value in asdict(cluster).items() if key not in left_out}
    if cluster.num_domains == cluster.num_hosts:  # as in studies from before there were domains of several hosts
        told["groups"] = [{k: v for k, v in group.items() if k != "hosts_per_domain"} for group in told["groups"]]
    return told
