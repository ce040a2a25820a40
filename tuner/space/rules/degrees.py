"""Rules on products of degrees, and on dimensions that a framework lacks."""

from __future__ import annotations

from costmodels.job.setting import Setting
from tuner.space.rules.rule import Rule


def _joined_in(s: Setting) -> str:
    is_host = s.cluster.num_domains == s.cluster.num_hosts
    return "of a host" if is_host else "that a domain of several hosts joins"


def _absent(dimension: str, what: str, default: int = 1) -> Rule:
    return Rule(
        name=f"no_{dimension}",
        needs=(dimension,),
        keep=lambda _, c: c[dimension] == default,
        reason=lambda s: f"{s.runtime.name} has no {what}, so {dimension} must be {default}",
    )


DEGREE_RULES = (
    _absent("pp", "pipeline parallelism"),
    _absent("tp", "tensor parallelism"),
    _absent("cp", "ring attention"),
    _absent("up", "Ulysses attention"),
    _absent("vpp", "interleaved schedule"),
    _absent("ep", "expert parallelism"),
    _absent("expert_tp", "tensor parallelism of the experts apart from tp", 0),
    _absent("dp_shard", "sharding over a part of dp", 0),
    _absent("recompute_layers", "recomputation of some layers of a stage", 0),
    Rule(
        name="devices",
        needs=("pp", "tp", "dp", "cp", "up"),
        keep=lambda s, c: c["pp"] * c["tp"] * c["dp"] * c["cp"] * c["up"] == s.cluster.num_devices,
        reason=lambda s: f"pp*tp*dp*cp*up must be the {s.cluster.num_devices} devices of the cluster",
    ),
    Rule(
        name="tp_divides_host",
        needs=("tp",),
        keep=lambda s, c: s.cluster.devices_per_domain % c["tp"] == 0,
        reason=lambda s: f"tp must divide the {s.cluster.devices_per_domain} devices {_joined_in(s)}",
    ),
    Rule(
        name="global_batch",
        needs=("dp", "mbs"),
        keep=lambda s, c: s.job.global_batch_size % (c["dp"] * c["mbs"]) == 0,
        reason=lambda s: f"dp*mbs must divide the global batch of {s.job.global_batch_size} sequences",
    ),
    Rule(
        name="one_micro_batch",
        needs=("dp", "mbs"),
        keep=lambda s, c: c["dp"] * c["mbs"] == s.job.global_batch_size,
        reason=lambda s: (
            f"dp*mbs must be the global batch of {s.job.global_batch_size} sequences: {s.runtime.name} adds up no "
            "gradients of several micro-batches"
        ),
    ),
)
