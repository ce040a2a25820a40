"""Frameworks that are asked whether they run a layout, what is drawn for each, and what is known to differ, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from benchmarks.support.oracles.deepspeed_rank import deepspeed_oracle, divisible
from benchmarks.support.oracles.draws import LENGTHS, Edges
from benchmarks.support.oracles.hybrids import hybrid
from benchmarks.support.oracles.megatron_rank import megatron_oracle
from benchmarks.support.oracles.nanotron_rank import nanotron_oracle
from benchmarks.support.oracles.torchtitan_rank import torchtitan_oracle
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting

Oracle = Callable[[Setting, ParallelConfig], str | None]
"""Function that returns how a framework refuses a layout; None if it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """A framework as an oracle.

    Attributes:
        module: Name of its package.
        make: Function that imports it and makes the oracle, for a process that asks no other framework.
        edges: What is drawn for it.
        known: Reasons for which a layout may be lost, by the name of the rule that refuses it.
    """

    module: str
    make: Callable[[], Oracle]
    edges: Edges
    known: Mapping[str, str] = field(default_factory=dict)


_STAGE = (
    "the cost model prices stages of at least one layer; a stage with the embedding or the head alone pays no layer"
)
_SEARCHED = "a rule of the search, not of the framework: the same layers in more chunks only send more"
_ONE_MESH = "the framework takes the flag for copies and shards over all replicas nevertheless"
_UNEQUAL = "tensors of unequal shares, which the cost model does not price: it takes those of equal ones"
_WARM = "a refusal of the warm-up of compiled kernels, which is left out here; rehearsals run it"
_EMPTY = "chunks between the ends without a layer, which only pass activations on"

FRAMEWORKS: dict[str, Framework] = {
    "deepspeed": Framework(
        module="deepspeed",
        make=deepspeed_oracle,
        edges=Edges(
            runtimes=("gpt-neox",),
            adapt=divisible,
            fixed=(("expert_tp", 0), ("sequence_parallel", False), ("dp_shard", 0)),
        ),
        known={"pp_layers": _STAGE},
    ),
    "megatron": Framework(
        module="megatron.core",
        make=megatron_oracle,
        edges=Edges(runtimes=("megatron-core",), facts=((), (), (("sharding", "fsdp2"),))),
        known={"vpp_shortens": _SEARCHED, "layers_or_layout": _EMPTY, "fsdp2_dp_shard": _ONE_MESH, "ffn_halves": _WARM},
    ),
    "megatron-hybrid": Framework(
        module="megatron.core",
        make=megatron_oracle,
        edges=Edges(runtimes=("megatron-core",), adapt=hybrid),
        known={"vpp_shortens": _SEARCHED, "layers_or_layout": _EMPTY, "ffn_halves": _WARM},
    ),
    "nanotron": Framework(
        module="nanotron",
        make=nanotron_oracle,
        edges=Edges(runtimes=("nanotron",), fixed=(("recompute", "none"), ("expert_tp", 0), ("dp_shard", 0))),
        known={"pp_layers": _STAGE},
    ),
    "torchtitan": Framework(
        module="torchtitan",
        make=torchtitan_oracle,
        edges=Edges(runtimes=("torchtitan",), lengths=(*LENGTHS, 256, 384, 512, 768)),
        known={"chunks_filled": _STAGE, "vpp_shortens": _SEARCHED, "ffn": _UNEQUAL},
    ),
}
"""Frameworks by name."""


def installed(name: str) -> Framework:
    """Return a framework.

    Raises:
        ImportError: It is not installed.
    """
    framework = FRAMEWORKS[name]
    if find_spec(framework.module.partition(".")[0]) is None:
        raise ImportError(f"No module named {framework.module!r}")
    return framework
