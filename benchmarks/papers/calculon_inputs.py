"""Measured runs in the words of Calculon: its dictionaries of an application, an execution and a system.

Calculon (Isaev et al. 2023, github.com/calculon-ai/calculon) knows dense layers of multi-head attention and an MLP of
two matrices, tensor, pipeline and data parallelism, interleaved stages, three kinds of recomputation, sequence
parallelism and sharded optimizers. Each kind of parallelism uses one tier of the network. `inexpressible` says why it
has no words for a run, and `approximations` what it has no words for but can come near to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.setting import Setting
from hardware.host_group import HostGroup

SYSTEMS: Mapping[str, str] = {"A100-SXM-80": "a100_80g.json", "H100-SXM-80": "h100_80g_nvl8.json"}
"""Calculon's own file for each device that has one."""

RECOMPUTE: Mapping[str, str] = {"none": "none", "selective": "attn_only", "full": "full"}

IN_HOST, BETWEEN_HOSTS = 0, 1
"""Tiers of the network in Calculon's files."""

AMPLE_GIB = 10**6
"""Memory of the devices, so that Calculon gives the time also of runs that it believes not to fit."""

_REFUSALS: Mapping[str, Callable[[MeasuredRun, Setting], bool]] = {
    "no file for these devices": lambda _, setting: (
        [group.device.name in SYSTEMS for group in setting.cluster.groups] != [True]
    ),
    "no mixture of experts": lambda run, _: run.model.is_moe,
    "no grouped-query or latent attention": lambda run, _: (
        run.model.plain.uses_mla or run.model.plain.num_kv_heads != run.model.plain.num_heads
    ),
    "no context parallelism": lambda run, _: run.config.cp * run.config.up > 1,
    "no sharded weights": lambda run, _: run.config.zero_stage == 3,
    "no sharding over a part of the replicas": lambda run, _: run.config.dp_shard not in (0, run.config.dp),
    "no uneven work": lambda run, _: bool(run.config.assignment),
    "no recomputation of these modules": lambda run, setting: (
        run.config.recompute == "selective"
        and (setting.runtime.selective_products or setting.job.recompute_modules != ("core_attn",))
    ),
    "its type of 16 bits only": lambda _, setting: setting.job.precision not in ("bf16", "fp16"),
}


def inexpressible(run: MeasuredRun, setting: Setting) -> str | None:
    """Return what Calculon lacks to express a run; None if it lacks nothing.

    Args:
        run: Measured run.
        setting: Its job, cluster and runtime.
    """
    return next((reason for reason, is_refused in _REFUSALS.items() if is_refused(run, setting)), None)


def approximations(run: MeasuredRun, setting: Setting) -> tuple[str, ...]:
    """Return what Calculon expresses only nearly in a run, in the words of a table."""
    nearly = {"gated MLP": run.model.plain.gated_ffn, "fused attention": setting.runtime.fused_attention}
    return tuple(name for name, is_so in nearly.items() if is_so)


def application_of(run: MeasuredRun) -> dict[str, int]:
    """Return Calculon's application: the sizes of the model.

    The three matrices of a gated MLP become two of 1.5 times the width: their parameters and FLOPs stay.
    """
    model = run.model
    return {
        "hidden": model.hidden_size,
        "feedforward": model.plain.ffn_size * 3 // 2 if model.plain.gated_ffn else model.plain.ffn_size,
        "seq_size": run.sequence_length,
        "attn_heads": model.plain.num_heads,
        "attn_size": model.plain.head_dim,
        "num_blocks": model.num_layers,
    }


def execution_of(run: MeasuredRun, setting: Setting) -> dict[str, Any]:
    """Return Calculon's execution of a run that it can express.

    Ranks are in Megatron-Core's order, tp fastest, then dp, then pp (costmodels/step/placement.py); a kind of
    parallelism whose ranks leave the host uses the network between hosts. Attention is never fused, and what Megatron
    gathers again under sequence parallelism is gathered again, as in Calculon's own validation.
    """
    config, runtime, per_host = run.config, setting.runtime, _hosts_of(setting).devices_per_host
    is_split = config.sequence_parallel and config.tp > 1
    return {
        "num_procs": run.devices,
        "tensor_par": config.tp,
        "pipeline_par": config.pp,
        "data_par": config.dp,
        "tensor_par_net": _tier(config.tp, per_host),
        "pipeline_par_net": _tier(config.tp * config.dp * config.pp, per_host),
        "data_par_net": _tier(config.tp * config.dp, per_host),
        "batch_size": run.global_batch_size,
        "microbatch_size": config.mbs,
        "datatype": "float16",  # its A100 has no other, and bf16 is as fast
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[config.recompute],
        "pipeline_interleaving": config.vpp,
        "optimizer_sharding": config.zero_stage > 0 and config.dp > 1,
        "tensor_par_comm_type": "rs_ag" if is_split else "ar",
        "tensor_par_overlap": "pipe" if runtime.overlaps_tensor and config.tp > 1 else "none",
        "seq_par_ag_redo": is_split and runtime.gathers_inputs_again and config.recompute != "full",
        "data_par_overlap": runtime.overlaps_gradients and config.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def system_of(setting: Setting, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return Calculon's system: its own file with the hosts and adapters of the run, and ample memory.

    Args:
        setting: Job, cluster and runtime of the run.
        published: Content of the file in SYSTEMS.
    """
    hosts, tiers = _hosts_of(setting), published["networks"]
    nic_gb_per_s = sum(link.bandwidth_bytes_per_s for link in hosts.nic_links) / 1e9
    return {
        **published,
        "mem1": {**published["mem1"], "GiB": AMPLE_GIB},
        "networks": [
            {**tiers[IN_HOST], "size": hosts.devices_per_host},
            {**tiers[BETWEEN_HOSTS], "bandwidth": nic_gb_per_s},
        ],
    }


def device_of(setting: Setting) -> str:
    """Return the device of a cluster of equal hosts."""
    return _hosts_of(setting).device.name


def _hosts_of(setting: Setting) -> HostGroup:
    (hosts,) = setting.cluster.groups
    return hosts


def _tier(ranks: int, devices_per_host: int) -> int:
    return IN_HOST if ranks <= devices_per_host else BETWEEN_HOSTS
