"""Calculon (Isaev et al. 2023, github.com/calculon-ai/calculon), and measured runs in its words.

It knows dense layers of multi-head attention and an MLP of two matrices, tensor, pipeline and data parallelism,
interleaved stages, three kinds of recomputation, sequence parallelism and sharded optimizers. Each kind of parallelism
uses one tier of the network. What it lacks is expressed so that parameters and FLOPs of the matrix products stay
(`application_of`), and a device without a file by the file of the device whose peak is nearest, scaled (`system_of`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.strangers.foreign_model import SHARED_REFUSALS, ForeignModel, Refusals, hosts_of, import_from
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.setting import Setting
from hardware.device import find_device

REPOSITORY = "https://github.com/calculon-ai/calculon"
FOLDER, MARK = "calculon", "calculon/llm/llm.py"
"""Folder that `git clone` makes, and a file in it."""

SYSTEMS: Mapping[str, str] = {"A100-SXM-80": "a100_80g.json", "H100-SXM-80": "h100_80g_nvl8.json"}
"""Calculon's own file for each device that has one."""

RECOMPUTE: Mapping[str, str] = {"none": "none", "selective": "attn_only", "full": "full"}

IN_HOST, BETWEEN_HOSTS = 0, 1
"""Tiers of the network in Calculon's files."""

AMPLE_GIB = 10**6
"""Memory of the devices, so that Calculon gives the time also of runs that it believes not to fit."""

_REFUSALS: Refusals = SHARED_REFUSALS | {
    "no mixture of experts": lambda run, _: run.model.is_moe,
    "no sharded weights": lambda run, _: run.config.zero_stage == 3,
    "no sharding over a part of the replicas": lambda run, _: run.config.dp_shard not in (0, run.config.dp),
}

_NEARLY: Refusals = {
    "scaled device": lambda _, setting: hosts_of(setting).device.name not in SYSTEMS,
    "fused attention": lambda _, setting: setting.runtime.fused_attention,
    "gated MLP": lambda run, _: run.model.plain.gated_ffn,
    "grouped-query attention": lambda run, _: run.model.plain.num_kv_heads != run.model.plain.num_heads,
    "vocabulary": lambda *_: True,
}


def load(folder: Path) -> ForeignModel:
    """Import Calculon from a checkout; it needs psutil.

    Raises:
        ConfigError: A library that it needs is missing.
    """
    package, module = import_from(folder, "calculon", "calculon.llm", repository=REPOSITORY)
    system_type, llm = package.System, module.Llm

    def predict(run: MeasuredRun, setting: Setting) -> tuple[float, float]:
        published = _read_json(folder / "systems" / SYSTEMS[nearest_device(setting)])
        try:
            system = system_type(system_of(setting, published))
            model = llm(llm.Application(application_of(run)), logging.getLogger(__name__))
            model.compile(system, llm.Execution.from_json(execution_of(run, setting)))
            model.run(system)
        except (llm.Error, AssertionError) as refusal:  # it checks its inputs with assertions
            raise ValueError(str(refusal) or "an assertion fails") from refusal
        return float(model.get_total_time()), float(model.get_mem_tier1_cap_req())

    return ForeignModel(name="Calculon", refusals=_REFUSALS, nearly=_NEARLY, predict=predict)


@cache
def _read_json(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def application_of(run: MeasuredRun) -> dict[str, int]:
    """Return Calculon's application: the sizes of the model.

    All parameters of the layers and the head are kept, and so are the FLOPs of their matrix products: the third matrix
    of a gated MLP, what key and value heads are fewer than heads, and an equal share of the head's table become
    width of the MLP of two matrices, which tensor parallelism divides evenly.
    """
    model, plain, tp = run.model, run.model.plain, run.config.tp
    width = plain.ffn_size * (1.5 if plain.gated_ffn else 1.0)
    width -= (plain.num_heads - plain.num_kv_heads) * plain.head_dim
    width += model.vocab_size / (2 * model.num_layers)
    return {
        "hidden": model.hidden_size,
        "feedforward": max(1, round(width / tp)) * tp,
        "seq_size": run.sequence_length,
        "attn_heads": plain.num_heads,
        "attn_size": plain.head_dim,
        "num_blocks": model.num_layers,
    }


def execution_of(run: MeasuredRun, setting: Setting) -> dict[str, Any]:
    """Return Calculon's execution of a run that it can express.

    Ranks are in Megatron-Core's order, tp fastest, then dp, then pp (costmodels/step/placement.py); a kind of
    parallelism whose ranks leave the host uses the network between hosts. Attention is never fused, and what Megatron
    gathers again under sequence parallelism is gathered again, as in Calculon's own validation.
    """
    config, runtime, per_host = run.config, setting.runtime, hosts_of(setting).devices_per_host
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

    Its tables of efficiencies stay. For a device without a file, the rates of its matrix and vector units are scaled by
    the published peaks in 16 bits, and memory and links within a host have their published bandwidths.

    Args:
        setting: Job, cluster and runtime of the run.
        published: Content of the file of `nearest_device`.
    """
    hosts, tiers = hosts_of(setting), published["networks"]
    nic_gb_per_s = sum(link.bandwidth_bytes_per_s for link in hosts.nic_links) / 1e9
    in_host = {**tiers[IN_HOST], "size": hosts.devices_per_host}
    system = {**published, "mem1": {**published["mem1"], "GiB": AMPLE_GIB}}
    if hosts.device.name not in SYSTEMS:
        nearest = find_device(nearest_device(setting))
        scale = hosts.device.peak_flop_per_s("bf16") / nearest.peak_flop_per_s("bf16")
        for unit in ("matrix", "vector"):
            table = published[unit]["float16"]
            system[unit] = {"float16": {**table, "tflops": table["tflops"] * scale}}
        system["mem1"]["GBps"] = hosts.device.memory_bandwidth_bytes_per_s / 1e9
        in_host["bandwidth"] = sum(link.bandwidth_bytes_per_s for link in hosts.intra_links) / 1e9
    return system | {"networks": [in_host, {**tiers[BETWEEN_HOSTS], "bandwidth": nic_gb_per_s}]}


def nearest_device(setting: Setting) -> str:
    """Return the device with a file whose peak in 16 bits is nearest to that of the run's device."""
    peak = hosts_of(setting).device.peak_flop_per_s("bf16")
    return min(SYSTEMS, key=lambda name: abs(math.log(peak / find_device(name).peak_flop_per_s("bf16"))))


def _tier(ranks: int, devices_per_host: int) -> int:
    return IN_HOST if ranks <= devices_per_host else BETWEEN_HOSTS
