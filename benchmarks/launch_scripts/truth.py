"""Facts that a launch script states, computed from its captured command without the importers of Meshtune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k")
"""Facts about the model."""
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "dp", "mbs")
"""Facts about the configuration."""
JOB = ("gbs", "sequence", "precision", "recompute", "zero_stage", "sequence_parallel", "offload")
"""Facts about the job."""
FACTS = ("world", *DEGREES, *JOB, *SIZES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What a script trains.

    Attributes:
        framework: Name of the framework: megatron, torchtitan, nanotron, gpt-neox, flagscale or deepspeed.
        facts: Values by the names of FACTS; a fact that the script does not state is absent.
        padded: Numbers of rows that an embedding table of the stated vocabulary may be padded to.
        other: Kind of training that is none of a whole decoder-only transformer, or empty.
        impossible: Why the framework would not start the command as it is written, or empty.
        trains: Whether the script starts a training at all; None if no command of it is known.
    """

    framework: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    padded: tuple[int, ...] = ()
    other: str = ""
    impossible: str = ""
    trains: bool | None = True

    @property
    def refusal(self) -> str:
        """Why a refusal is right, or nothing."""
        return self.other or self.impossible or ("" if self.trains else "no training")


NOTHING = Truth(trains=False)
"""Truth of a script that starts no training."""
UNKNOWN = Truth(trains=None)
"""Truth of a script of which no command is known."""


def contradiction(facts: Mapping[str, Any]) -> str:
    """Return why a configuration cannot start, or nothing: devices, experts and batch must divide."""
    copy = facts.get("tp", 1) * facts.get("pp", 1) * facts.get("cp", 1)
    world, dp = facts.get("world"), facts.get("dp")
    if world and world % copy:
        return f"{world} devices are no multiple of the {copy} of one replica"
    if dp and (facts["tp"] * facts.get("cp", 1) * dp) % facts.get("ep", 1):
        return f"{facts['ep']} expert ranks do not divide the ranks of a stage"
    if dp and facts.get("gbs") and facts.get("mbs") and facts["gbs"] % (dp * facts["mbs"]):
        return f"a batch of {facts['gbs']} is no multiple of dp * mbs"
    return ""
