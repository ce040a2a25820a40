"""Nodes of a Slurm cluster that are up, through `scontrol show node`.

Source: the manual page of scontrol of Slurm 24.05 (NODE STATE CODES); checked with 22.05.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hardware.io.errors import quote_value
from trials.command.slurm.queue import QueueError, ask_slurm

GONE = frozenset(
    {
        *("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL", "UNKNOWN"),
        *("NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP"),
        *("REBOOT_ISSUED", "REBOOT_REQUESTED"),
    }
)
"""States, and flags behind them, of nodes on which no job should run. An administrator drains a node to take it out."""

_FIELD = re.compile(r"(?:^| )(NodeName|NodeAddr|State|Gres|CPUTot|Reason)=(\S*)")
_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,99999}")
"""Names of nodes, joined by commas, with ranges in brackets (scontrol's manual page, `show hostnames`)."""

_GPUS = re.compile(r"gpu(?::[^:(]+)?:([0-9]{1,6})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """Node as the controller knows it.

    Attributes:
        name: Name of the node.
        state: State with its flags, such as IDLE+DRAIN.
        cpus: Number of cores.
        gpus: Number of GPUs; None if the cluster does not count them.
        address: Address at which Slurm reaches the node.
    """

    name: str
    state: str
    cpus: int
    gpus: int | None
    address: str = ""

    @property
    def is_up(self) -> bool:
        """Whether jobs can run there."""
        return not GONE & {*re.split(r"[^A-Z_]+", self.state.upper())}


def slurm_nodes(names: str | None = None) -> tuple[SlurmNode, ...]:
    """Return the nodes that a list such as `node[01-08]` names; by default those of this job, or else all.

    Raises:
        QueueError: The controller does not answer, or knows no such node.
    """
    wanted = os.environ.get("SLURM_JOB_NODELIST") or None if names is None else names
    if wanted is not None and not _LIST.fullmatch(wanted):
        # scontrol would take what begins with a dash for one of its options
        raise QueueError(f"{quote_value(wanted)} is no list of nodes, such as node[01-08]")
    try:
        return read_nodes(ask_slurm(["scontrol", "show", "node", "--oneliner", *([wanted] if wanted else [])]))
    except QueueError as error:
        if wanted is None or error.is_passing:
            raise
        raise QueueError(f"it knows no nodes {wanted} ({error})") from None  # scontrol says so on standard output


def read_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Read what `scontrol show node --oneliner` prints.

    Raises:
        QueueError: It names no node.
    """
    found = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(line):
            fields.setdefault(name, value)
        if fields.get("NodeName") and "State" in fields:
            gres = [int(count) for count in _GPUS.findall(fields.get("Gres", ""))]
            cpus = fields.get("CPUTot", "")
            found.append(
                SlurmNode(
                    name=fields["NodeName"],
                    state=fields["State"],
                    cpus=int(cpus) if re.fullmatch("[0-9]{1,9}", cpus) else 0,
                    gpus=sum(gres) if gres else None,
                    address=fields.get("NodeAddr", fields["NodeName"]),
                )
            )
    if not found:
        raise QueueError(f"scontrol printed no node: {text[:200]}")
    return tuple(found)
