"""Exporter for the flags of torchtitan's trainer up to 0.3; torchtitan_main.py writes for the main branch after it.

Sources: torchtitan config/configs.py (`TrainingConfig`, `ParallelismConfig`: names and meanings), config/manager.py
(lists are comma-separated words), distributed/activation_checkpoint.py (the policy is a subcommand),
distributed/pipeline_parallel.py (equal stages are given by their length, others by the names of their modules),
distributed/parallel_dims.py (context parallelism also shards the weights; expert parallel ranks are taken from
dp_shard, cp and tp), trainer.py (`Trainer.Config`: no CUDA graphs with a pipeline),
torch/distributed/pipelining/schedules.py (names of schedules).
"""

from __future__ import annotations

from itertools import accumulate

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.parts import (
    Part,
    closing_notes,
    describe_uneven_work,
    export_flags,
    layers_of_parts,
    num_micro_batches,
    set_optimizer,
    stated_facts,
    without_experts,
)
from tuner.export.sequences import torchtitan_sequences
from tuner.export.torchtitan_flags import (
    CP,
    EP,
    FIRST,
    GLOBAL,
    LAST,
    LENGTH,
    LOCAL,
    MICRO,
    MODULES,
    NO_GRAPHS,
    PER_STAGE,
    PP,
    PRECISION,
    REPLICATE,
    RESHARD,
    SCHEDULE,
    SEQUENCE_PARALLEL,
    SHARD,
    TP,
    WHOLE_NORMS,
)

ARRAY = "TORCHTITAN_ARGS"
"""Name of the bash array that the exported text defines."""

VERSIONS = "torchtitan 0.3; checked with 0.3.0; later versions take no flags, see torchtitan-main"
"""Versions of the framework that take the flags."""

NAMED = ("recompute", "zero_stage", "sequence_parallel", "dp_shard")
"""Further dimensions that the flags express."""


def export_torchtitan(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of flags for the trainer of 0.3.

    The array must be last on the command line, because it ends with a subcommand.
    """
    return export_flags(
        "torchtitan",
        _with_facts(setting, torchtitan_parts(setting, config)),
        array=ARRAY,
        head=(str(config), f"Versions: {VERSIONS}"),
        usage=f'torchrun ... -m torchtitan.train --module ... --config ... "${{{ARRAY}[@]}}"',
        stated=setting.runtime.stated,
        notes=closing_notes(setting, config, "torchtitan", rule_sets=("torchtitan",), named=NAMED),
    )


def torchtitan_parts(setting: Setting, config: ParallelConfig) -> list[Part]:
    """Return the flags of 0.3 grouped by concern, each group with notes about what it cannot express."""
    return [
        _batch(setting, config),
        torchtitan_sequences(setting, config),
        _data_parallel(setting, config),
        _tensor(config),
        _pipeline(setting, config),
        describe_uneven_work(
            setting,
            config,
            framework="torchtitan",
            recomputed="applies one recomputation policy to all layers; the number of layers cannot be set",
        ),
        _context(config),
        _experts(setting, config),
        _precision(setting),
        _recompute(setting, config),
    ]


def _with_facts(setting: Setting, parts: list[Part]) -> list[Part]:
    """Return the parts with the facts that the study states before the last, which ends the command."""
    # 0.3 reduces gradients in float32 only, which no flag changes
    stated = stated_facts(setting, "torchtitan", elsewhere=("gradient_message_bytes",))
    return [*parts[:-1], stated, parts[-1]]


def shards_of(config: ParallelConfig) -> int:
    """Return the number of data parallel ranks over which the states are sharded; 1 without sharding."""
    return (config.dp_shard or config.dp) if config.zero_stage else 1


def _batch(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags for batch sizes and sequence length.

    With a pipeline, the local batch contains all micro-batches of a step. Without one, each micro-batch is a local
    batch.
    """
    job = setting.job
    local = config.mbs * (num_micro_batches(setting, config) if config.pp > 1 else 1)
    return Part(
        flags=(
            f"{LOCAL} {local}",
            f"{GLOBAL} {job.global_batch_size}",
            f"{LENGTH} {job.sequence_length}",
            # Trainer.Config rejects CUDA graphs with a pipeline and with most token dispatchers
            *((NO_GRAPHS,) if config.pp > 1 or config.ep > 1 else ()),
        )
    )


def _data_parallel(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of data parallelism.

    FSDP2 shards weights, gradients and optimizer states together. It corresponds to ZeRO 2 if the weights stay gathered
    after the forward pass, otherwise to ZeRO 3.
    """
    shards, stage = shards_of(config), config.zero_stage
    flags = [f"{REPLICATE} {config.dp // shards}", f"{SHARD} {shards}"]
    notes = []
    if stage:
        flags.append(f"{RESHARD} {'always' if stage == 3 else 'never'}")
    if stage == 1:
        notes.append(
            "zero_stage: torchtitan shards gradients and weights with the optimizer states; stage 1 is exported as 2"
        )
    if not stage and config.cp * config.up > 1:
        notes.append("zero_stage: torchtitan always shards weights over the context parallel ranks")
    how = "no flag changes AdamW to {name}; change optimizer.param_groups in the recipe"
    notes += set_optimizer("torchtitan", "torchtitan", setting.job, how)
    return Part(flags=tuple(flags), notes=tuple(notes))


def _tensor(config: ParallelConfig) -> Part:
    flags = [f"{TP} {config.tp}"]
    if config.tp > 1:
        flags.append(SEQUENCE_PARALLEL if config.sequence_parallel else WHOLE_NORMS)
    return Part(flags=tuple(flags))


def _pipeline(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of pipeline parallelism: equal stages by their length, others by the names of their modules."""
    degree = f"{PP} {config.pp}"
    if config.pp == 1:
        note = "vpp: torchtitan supports virtual stages only with pp > 1"
        return Part(flags=(degree,), notes=(note,) if config.vpp > 1 else ())
    flags = [degree, f"{SCHEDULE} {'Interleaved1F1B' if config.vpp > 1 else '1F1B'}", f"{MICRO} {config.mbs}"]
    # torchtitan models/common/decoder.py: "Weight tying is not supported with Pipeline Parallel"
    tied = "pp: torchtitan refuses a pipeline for models with tied embeddings"
    notes = [tied] if setting.job.model.tied_embeddings else []
    planned = layers_of_parts(setting, config)
    if len(set(planned)) == 1:
        flags += [f"{FIRST} 0", f"{LAST} 0", f"{PER_STAGE} {planned[0]}"]
        return Part(flags=tuple(flags), notes=tuple(notes))
    flags.append(f"{MODULES} {' '.join(_modules(planned))}")
    if config.assignment.layers:
        notes.append("pp: the lists of modules give each virtual stage the number of layers that the study planned")
    if 0 in planned[1:-1]:
        notes.append("pp: torchtitan cannot run a stage without layers, but the study planned such stages")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _modules(planned: tuple[int, ...]) -> list[str]:
    """Return the modules of each part, by their names in the decoders of torchtitan.models.common."""
    ends = list(accumulate(planned))
    parts = [[f"layers.{at}" for at in range(end - held, end)] for held, end in zip(planned, ends, strict=True)]
    parts[0] = ["tok_embeddings", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "lm_head"]
    return [",".join(part) or "''" for part in parts]


def _context(config: ParallelConfig) -> Part:
    note = f"up: torchtitan has no Ulysses attention; ring attention of cp*up = {config.cp * config.up} replaces it"
    return Part(flags=(f"{CP} {config.cp * config.up}",), notes=(note,) if config.up > 1 else ())


def _experts(setting: Setting, config: ParallelConfig) -> Part:
    if not setting.job.model.is_moe:
        note = without_experts(config)
        return Part(notes=(note,) if config.ep > 1 else ())
    ranks = shards_of(config) * config.cp * config.up * config.tp
    note = f"ep: {config.ep} must divide dp_shard*cp*tp = {ranks}, the ranks that torchtitan assigns to experts"
    flag = f"{EP} {config.ep}"
    return Part(flags=(flag,), notes=(note,) if ranks % config.ep else ())


def _precision(setting: Setting) -> Part:
    """Return the flag for the number format of parameters."""
    wanted = setting.job.precision
    single = wanted in ("fp32", "tf32")
    notes = {
        "fp16": "precision: torchtitan has no fp16; it is exported as bf16",
        "fp8": "precision: no flag enables fp8; add a model converter to the recipe",
        "nvfp4": "precision: no flag enables nvfp4; add a model converter to the recipe",
        "tf32": "precision: torchtitan has no flag for tf32; set torch.backends.cuda.matmul.allow_tf32",
    }
    return Part(
        flags=(f"{PRECISION} {'float32' if single else 'bfloat16'}",), notes=(notes[wanted],) if wanted in notes else ()
    )


def _recompute(setting: Setting, config: ParallelConfig) -> Part:
    note = (
        "recompute: torchtitan's selective policy keeps the results of most matrix products and all communication, and "
        f"recomputes everything else; it cannot select {', '.join(setting.job.recompute_modules)}"
    )
    return Part(
        flags=(f"activation-checkpoint:{config.recompute}",), notes=(note,) if config.recompute == "selective" else ()
    )
