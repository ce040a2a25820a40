"""Text of a new study of a user's own training step, as `meshtune init --from-jax` or `--from-torch` writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from hardware.cluster_file import cluster_from_mapping
from hardware.io.errors import ConfigError
from trials.own_step import World
from trials.rank_backend import is_cpu_cluster
from tuner.study_file.cluster_keys import StatedHosts, cluster_keys

_COMMAND = """trial:
  backend: command
  command: {words}
  log: {{pattern: ['step (?P<iteration>\\d+) took (?P<step_s>[\\d.]+) s']}}  # what your program prints of each step
  warmup_steps: 2
  steps: 5"""


def own_study_text(
    world: World,
    factory: str,
    *,
    cluster: str,
    hosts: int | None,
    devices_per_host: int | None,
    command: Sequence[str] = (),
) -> str:
    """Return the text of a study file.

    Args:
        world: Library of the step.
        factory: Factory of the step, as `module:factory`.
        cluster: Words of `cluster_keys`.
        hosts: Number of hosts; None for one.
        devices_per_host: Number of devices of each host that are used; None for all.
        command: Command of the trials; none to run the step itself, or in a simulated world.

    Raises:
        ConfigError: The cluster does not exist, or its hosts have fewer devices.
    """
    # a study may be checked in another folder than it will be in
    keys = cluster_keys(cluster, StatedHosts(hosts=hosts, devices_per_host=devices_per_host), Path("/"))
    try:
        found = cluster_from_mapping(keys, Path())
    except ConfigError as error:
        raise error.under("--cluster" if error.key == "name" else "cluster") from None
    trains = is_cpu_cluster(found)
    trial = (
        f"trial: {{backend: {world}}}  # real steps on this machine's processors"
        if trains
        else "trial: {backend: simulated}"
    )
    if command:
        trial = _COMMAND.format(words=yaml.safe_dump(list(command), default_flow_style=True, width=1000).strip())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", factory).strip("-._")[:100] or "own-step"
    return "\n".join(
        (
            f"# Written by `meshtune init` for the training step that {_flow(factory)} returns.",
            f"name: {_flow(name)}",
            f"model: {{{world}: {_flow(factory)}}}  # imported from this file's folder or from the working directory",
            f"cluster: {{{', '.join(f'{key}: {_flow(value)}' for key, value in keys.items())}}}",
            "# space: {tp: [1, 2]}  # searches these sizes of the axis model alone; dp is data",
            "search: {max_trials: 40, seed: 0}",
            trial,
            "",
        )
    )


def _flow(value: object) -> str:
    """Return a value as YAML writes it within braces."""
    return yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
