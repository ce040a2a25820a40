"""llm-analysis (Li 2023, github.com/cli99/llm-analysis), and measured runs in its words.

It knows dense layers and layers of experts, grouped queries, gated MLPs, a vocabulary, tensor, pipeline, expert and
sharded data parallelism, and four kinds of recomputation. Its pipelines have no bubble, so interleaved stages are as
others, and it counts no exchange of gradients. Its efficiencies are inputs: those that its README names for training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.strangers.foreign_model import SHARED_REFUSALS, ForeignModel, Refusals, hosts_of, import_from
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.setting import Setting

REPOSITORY = "https://github.com/cli99/llm-analysis"
FOLDER, MARK = "llm-analysis", "llm_analysis/analysis.py"
"""Folder that `git clone` makes, and a file in it."""

EFFICIENCIES: Mapping[str, float] = {"flops_efficiency": 0.5, "hbm_memory_efficiency": 0.9}
"""Shares of the peaks that its README names where nothing was profiled: "up to 0.5 for large scale model training" and
"0.9 can be an aggressive target"."""

GIB = 2**30

LEAST_MESSAGE_S = 8e-6
"""Shortest message within a host in each of its files of GPUs [s]."""

RECOMPUTE: Mapping[str, str] = {"none": "NONE", "selective": "ATTN_COMPUTE", "full": "FULL"}

_REFUSALS: Refusals = SHARED_REFUSALS | {
    "no heads of another width than hidden / heads": lambda run, _: (
        run.model.plain.num_heads * run.model.plain.head_dim != run.model.hidden_size
    ),
    "no dense layers among layers of experts": lambda run, _: run.model.is_moe and not _has_only_experts(run),
    "no shared experts": lambda run, _: run.model.plain.num_shared_experts > 0,
    "no tensor parallelism of experts by itself": lambda run, _: run.config.expert_tp not in (0, run.config.tp),
}

_NEARLY: Refusals = {
    "pipeline without bubble": lambda run, _: run.config.pp > 1,
    "several experts per token": lambda run, _: run.model.top_k > 1,
    "untied embedding": lambda run, _: not run.model.tied_embeddings,
}


def _has_only_experts(run: MeasuredRun) -> bool:
    return all(run.model.plain.is_moe_layer(layer) for layer in range(run.model.num_layers))


def load(folder: Path) -> ForeignModel:
    """Import llm-analysis from a checkout or from where `pip install --target` put it; it needs fire.

    Raises:
        ConfigError: A library that it needs is missing.
    """
    analysis, config = import_from(folder, "llm_analysis.analysis", "llm_analysis.config", repository=REPOSITORY)
    analysis.logger.setLevel("CRITICAL")

    def ask(run: MeasuredRun, setting: Setting, *, sharded: bool) -> Mapping[str, Any]:
        """Return its answer with replicas that share their states, or with independent ones."""
        model = analysis.LLMAnalysis(
            config.ModelConfig(**model_of(run)),
            config.GPUConfig(**gpu_of(setting)),
            parallelism_config=config.ParallelismConfig(**parallelism_of(run, sharded=sharded)),
            **EFFICIENCIES,
        )
        found: Mapping[str, Any] = model.training(
            batch_size_per_gpu=run.config.mbs,
            global_batch_size=run.global_batch_size,
            seq_len=run.sequence_length,
            activation_recomputation=analysis.ActivationRecomputation[RECOMPUTE[run.config.recompute]],
            ds_zero=analysis.DSZeRO(run.config.zero_stage if sharded else 0),
            flash_attn=setting.runtime.fused_attention,
        )
        return found

    def predict(run: MeasuredRun, setting: Setting) -> tuple[float, float]:
        stage = run.config.zero_stage
        try:
            # at any stage it gathers the weights of sharded replicas in every layer, as ZeRO-3 alone does
            step = ask(run, setting, sharded=stage == 3)
            peak = step if stage in (0, 3) else ask(run, setting, sharded=True)
        except AssertionError as refusal:  # it checks its inputs and its count of FLOPs with assertions
            raise ValueError(str(refusal) or "its check of FLOPs fails") from refusal
        return float(step["latency_per_iter"]), float(peak["estimated_peak_memory_per_gpu"])

    return ForeignModel(name="llm-analysis", refusals=_REFUSALS, nearly=_NEARLY, predict=predict)


def model_of(run: MeasuredRun) -> dict[str, Any]:
    """Return its configuration of the model.

    It counts the FLOPs of one expert per token. So k experts that a token visits become one of k times the width, of
    which there are a k-th as many: parameters and FLOPs stay.
    """
    model, plain = run.model, run.model.plain
    per_token = max(model.top_k, 1)
    return {
        "name": model.name,
        "num_layers": model.num_layers,
        "n_head": plain.num_heads,
        "num_key_value_heads": plain.num_kv_heads,
        "hidden_dim": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_seq_len": run.sequence_length,
        "ffn_embed_dim": plain.expert_ffn_size * per_token if model.is_moe else plain.ffn_size,
        "mlp_gated_linear_units": plain.gated_ffn,
        "moe_num_experts": model.num_experts / per_token if model.is_moe else 1,
        "moe_top_k": per_token,
    }


def gpu_of(setting: Setting) -> dict[str, Any]:
    """Return its configuration of the device: published peaks, and the links of the run's hosts.

    It warns where memory is too small, and predicts all the same.
    """
    hosts = hosts_of(setting)
    in_host, between = (
        sum(link.bandwidth_bytes_per_s for link in links) / 1e9 for links in (hosts.intra_links, hosts.nic_links)
    )
    return {
        "name": hosts.device.name,
        "mem_per_GPU_in_GB": hosts.device.memory_bytes / GIB,
        "hbm_bandwidth_in_GB_per_sec": hosts.device.memory_bandwidth_bytes_per_s / 1e9,
        "intra_node_bandwidth_in_GB_per_sec": in_host,
        "intra_node_min_message_latency": LEAST_MESSAGE_S,
        "peak_fp16_TFLOPS": hosts.device.peak_flop_per_s("bf16") / 1e12,
        "inter_node_bandwidth_in_GB_per_sec": between,
    }


def parallelism_of(run: MeasuredRun, *, sharded: bool) -> dict[str, int]:
    """Return its configuration of parallelism, with replicas that share their states or independent ones."""
    config = run.config
    shard = (config.dp_shard or config.dp) if sharded else 1
    return {
        "tp_size": config.tp,
        "pp_size": config.pp,
        "dp_size": shard,
        "rdp_size": config.dp // shard,
        "ep_size": config.ep,
        "sp_size": config.tp if config.sequence_parallel else 1,
    }
