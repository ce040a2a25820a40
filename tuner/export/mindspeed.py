"""Exporter for the flags of MindSpeed-LLM's pretrain scripts.

Most flags are those of Megatron-LM. MindSpeed-LLM has its own flags for context and pipeline parallelism.

Sources: MindSpeed-LLM mindspeed_llm/training/arguments.py (`_add_cp_args`, `_validate_cp_args`, `_add_algorithm_args`
for --noop-layers, `_add_moe_args`); MindSpeed features_manager/context_parallel (degrees of the hybrid algorithm) and
features_manager/pipeline_parallel/noop_layers.py (layer numbers begin at 0; --num-layers includes the no-op layers).
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.optimizers.registry import OPTIMIZERS
from tuner.export.exporter import Export
from tuner.export.megatron import (
    ARRAY,
    batch,
    block_layers,
    block_note,
    environment,
    experts,
    head_comments,
    megatron_facts,
    optimizer_part,
    overlap_flags,
    recompute_flags,
    tensor,
)
from tuner.export.parts import Part, closing_notes, describe_uneven_work, export_flags, layers_of_parts
from tuner.export.sequences import mindspeed_sequences

VERSIONS = "MindSpeed-LLM with --use-mcore-models; its common flags are checked with megatron-core 0.19.2"
"""Versions of the framework that take the flags."""

NAMED = ("recompute", "zero_stage", "sequence_parallel", "expert_tp", "recompute_layers")
"""Further dimensions that the flags express."""


def export_mindspeed(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of flags, which a pretrain script is called with."""
    parts = [
        tensor(setting, config),
        _pipeline(setting, config),
        describe_uneven_work(setting, config, framework="MindSpeed-LLM", recomputed=block_note(setting, config)),
        _context(setting, config),
        experts(setting, config),
        batch(setting, config),
        mindspeed_sequences(setting, config),
        _data_parallel(setting, config),
        _recompute(setting, config),
        _precision(setting),
        megatron_facts(setting, config),
    ]
    return export_flags(
        "mindspeed",
        parts,
        array=ARRAY,
        head=(*head_comments(config), f"Versions: {VERSIONS}"),
        usage=f'torchrun ... pretrain_gpt.py --use-mcore-models "${{{ARRAY}[@]}}" ...',
        environment=environment(config, sharded=False),
        stated=setting.runtime.stated,
        notes=closing_notes(setting, config, "MindSpeed-LLM", rule_sets=("mindspeed",), named=NAMED),
    )


def _pipeline(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of pipeline parallelism.

    MindSpeed-LLM requires virtual stages of equal length, so that no-op layers are appended to the shorter ones.
    """
    chunks, planned = config.pp * config.vpp, layers_of_parts(setting, config)
    longest = max(planned)
    filled = longest * chunks
    flags = [f"--pipeline-model-parallel-size {config.pp}"]
    notes = []
    if config.vpp > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {longest}")
    if filled > sum(planned):
        empty = [chunk * longest + place for chunk, held in enumerate(planned) for place in range(held, longest)]
        flags += [f"--num-layers {filled}", f"--noop-layers {','.join(map(str, empty))}"]
        notes.append(
            f"{'vpp' if config.vpp > 1 else 'pp'}: {len(empty)} of {filled} layers are no-op layers, so that each of "
            f"the {chunks} parts gets its planned layers; remove --num-layers {sum(planned)} from your command"
        )
    return Part(flags=tuple(flags), notes=tuple(notes))


def _context(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of context parallelism.

    There is one group of cp*up ranks. The hybrid algorithm runs the all-to-all among `up` neighbours.
    """
    size = config.cp * config.up
    flags = [f"--context-parallel-size {size}"]
    notes = []
    if size > 1:
        ring = "hybrid_cp_algo" if config.up > 1 else "megatron_cp_algo"
        flags.append(f"--context-parallel-algo {ring if config.cp > 1 else 'ulysses_cp_algo'}")
    if config.cp > 1 and config.up > 1:
        flags.append(f"--ulysses-degree-in-cp {config.up}")
    # Megatron-LM's check runs before MindSpeed's and applies to Ulysses as well
    if size > 1 and setting.job.sequence_length % (2 * size):
        notes.append(
            f"{'cp' if config.cp > 1 else 'up'}: Megatron-LM's check requires a sequence length divisible by 2*cp*up = "
            f"{2 * size}; it is {setting.job.sequence_length}"
        )
    return Part(flags=tuple(flags), notes=tuple(notes))


def _data_parallel(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of data parallelism. The distributed optimizer (ZeRO 1) is the only sharding available."""
    job = setting.job
    stage = OPTIMIZERS[job.optimizer].sharded_stage("mindspeed", config.zero_stage)
    flags = ["--use-distributed-optimizer"] if stage else []
    flags += overlap_flags(setting.runtime, config, is_sharded=stage > 0)
    why = "shards the optimizer states only" if stage else f"cannot shard the states of {job.optimizer}"
    note = f"zero_stage: MindSpeed-LLM {why}; stage {config.zero_stage} is exported as {stage}"
    return Part(flags=tuple(flags), notes=(note,) if stage < config.zero_stage else ())


def _recompute(setting: Setting, config: ParallelConfig) -> Part:
    modules = setting.job.recompute_modules
    note = f"recompute: selective recomputation in MindSpeed-LLM covers the core attention, not {', '.join(modules)}"
    if number := block_layers(setting, config):
        return Part(
            flags=("--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {number}")
        )
    other = config.recompute == "selective" and modules != ("core_attn",)
    return Part(flags=recompute_flags(setting, config), notes=(note,) if other else ())


def _precision(setting: Setting) -> Part:
    """Return the flags for the number format and the optimizer."""
    job = setting.job
    numerics = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp8": ("--bf16",), "nvfp4": ("--bf16",)}
    optimizer = optimizer_part(job)
    note = f"precision: the export has no flag that enables {job.precision} in MindSpeed-LLM"
    return Part(
        flags=(
            *numerics.get(job.precision, ()),
            *optimizer.flags,
            *(["--reuse-fp32-param"] if job.shared_master_weights else []),
        ),
        notes=(*optimizer.notes, *(() if job.precision in ("bf16", "fp16", "fp32") else (note,))),
    )
