"""Nodes that Ray and Slurm say are up, as a watch needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.command.slurm.nodes import slurm_nodes
from trials.command.slurm.queue import QueueError
from trials.on_ray.members import RayMembers
from tuner.watch.hosts import Node


def nodes_of_ray(members: RayMembers, cluster: Cluster) -> Sequence[Node]:
    """Return the nodes of a Ray cluster that are alive.

    Raises:
        ConfigError: The cluster does not answer.
    """
    counts_cpus = all(device.is_processor for device in cluster.devices)
    return [
        Node(name=one.address, identity=one.node_id, devices=one.cpus if counts_cpus else one.devices)
        for one in members.living()
    ]


def nodes_of_slurm(names: str | None, cluster: Cluster) -> Sequence[Node]:
    """Return the nodes of a Slurm cluster that are up.

    Args:
        names: List of nodes, such as `node[01-08]`; None for those of this job, or else all.
        cluster: Cluster of the study, whose devices decide what is counted.

    Raises:
        ConfigError: Slurm does not answer, or knows no such nodes.
    """
    try:
        nodes = slurm_nodes(names)
    except QueueError as error:
        raise ConfigError(
            f"does not answer: {error}", key="--hosts-from", value="slurm" if names is None else f"slurm, {names}"
        ) from None
    counts_cpus = all(device.is_processor for device in cluster.devices)
    counts_gpus = any(node.gpus is not None for node in nodes)
    return [
        Node(
            name=node.name,
            # the start of a node's system is given to the second only, and differs by one from time to time
            identity="",
            devices=node.cpus if counts_cpus else (node.gpus or 0) if counts_gpus else None,
        )
        for node in nodes
        if node.is_up
    ]


def job_to_probe(environment: Mapping[str, str]) -> str:
    """Return the number of the Slurm job in whose nodes a probe runs: the job of this process.

    Raises:
        ConfigError: This process runs in no job.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise ConfigError(
            "needs the job whose nodes it measures, and this watch runs in none",
            key="--probe",
            nearest="start the watch in the training's batch script, or set SLURM_JOB_ID to the job's number",
        )
    return job
