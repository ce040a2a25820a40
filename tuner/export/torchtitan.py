"""The flags of torchtitan's trainer (torchtitan 0.3).

Sources: torchtitan config/configs.py (`TrainingConfig`, `ParallelismConfig`: names and meanings), config/manager.py
(lists are words between commas), distributed/activation_checkpoint.py (the policy is a subcommand),
distributed/pipeline_parallel.py (stages by the names of their modules; equal ones by their size),
distributed/parallel_dims.py (context parallelism always shards the weights too, experts borrow ranks of dp_shard, cp
and tp), trainer.py (`Trainer.Config`: no CUDA graphs with a pipeline), torch/distributed/pipelining/schedules.py (names
of schedules).
"""

from __future__ import annotations

from itertools import accumulate

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.parts import Part, export_flags, layers_of_parts, runtime_note, uneven

ARRAY = "TORCHTITAN_ARGS"
"""Name of the bash array that the text defines."""


def export_torchtitan(setting: Setting, config: ParallelConfig) -> Export:
    """A bash array of flags, to stand last in the call of the trainer: nothing may follow a subcommand."""
    parts = [
        _batch(setting, config),
        _data_parallel(setting, config),
        _tensor(config),
        _pipeline(setting, config),
        uneven(
            setting,
            config,
            framework="torchtitan",
            recomputed="has one policy for all layers, and no number of layers that recompute",
        ),
        _context(config),
        _experts(setting, config),
        _precision(setting),
        _recompute(setting, config),
    ]
    return export_flags(
        "torchtitan",
        parts,
        array=ARRAY,
        head=(str(config),),
        usage=f'torchrun ... -m torchtitan.train --module ... --config ... "${{{ARRAY}[@]}}"',
        notes=runtime_note(setting, "torchtitan", ("torchtitan",)),
    )


def shards_of(config: ParallelConfig) -> int:
    """Data parallel ranks over which weights, gradients and optimizer states are sharded; 1 where none is."""
    return (config.dp_shard or config.dp) if config.zero_stage else 1


def _batch(setting: Setting, config: ParallelConfig) -> Part:
    """With a pipeline the local batch holds all micro-batches of a step, without one each is a local batch."""
    job = setting.job
    micro_batches = max(job.global_batch_size // (config.dp * config.mbs), 1)
    local = config.mbs * (micro_batches if config.pp > 1 else 1)
    return Part(
        flags=(
            f"--training.local_batch_size {local}",
            f"--training.global_batch_size {job.global_batch_size}",
            f"--training.seq_len {job.sequence_length}",
            # Trainer.Config refuses captured steps with a pipeline, and with most ways to exchange tokens
            *(("--training.disable_cuda_graphs",) if config.pp > 1 or config.ep > 1 else ()),
        )
    )


def _data_parallel(setting: Setting, config: ParallelConfig) -> Part:
    """FSDP2 shards all states at once; whether weights stay gathered is what tells ZeRO 2 from 3."""
    shards, stage = shards_of(config), config.zero_stage
    flags = [
        f"--parallelism.data_parallel_replicate_degree {config.dp // shards}",
        f"--parallelism.data_parallel_shard_degree {shards}",
    ]
    notes = []
    if stage:
        flags.append(f"--parallelism.fsdp_reshard_after_forward {'always' if stage == 3 else 'never'}")
    if stage == 1:
        notes.append("zero_stage: torchtitan shards gradients and weights with the states; stage 2 stands for 1")
    if not stage and config.cp * config.up > 1:
        notes.append("zero_stage: torchtitan shards weights over the context parallel ranks whatever dp does")
    if setting.job.optimizer != "adam":
        notes.append(f"optimizer: no flag changes a recipe's AdamW to {setting.job.optimizer}")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _tensor(config: ParallelConfig) -> Part:
    flags = [f"--parallelism.tensor_parallel_degree {config.tp}"]
    if config.tp > 1:
        flags.append(f"--parallelism.{'' if config.sequence_parallel else 'no_'}enable_sequence_parallel")
    return Part(flags=tuple(flags))


def _pipeline(setting: Setting, config: ParallelConfig) -> Part:
    """Equal stages by their number of layers, others by the names of their modules."""
    degree = f"--parallelism.pipeline_parallel_degree {config.pp}"
    if config.pp == 1:
        note = "vpp: torchtitan has virtual stages in a pipeline only (pp > 1)"
        return Part(flags=(degree,), notes=(note,) if config.vpp > 1 else ())
    flags = [
        degree,
        f"--parallelism.pipeline_parallel_schedule {'Interleaved1F1B' if config.vpp > 1 else '1F1B'}",
        f"--parallelism.pipeline_parallel_microbatch_size {config.mbs}",
    ]
    planned = layers_of_parts(setting, config)
    if len(set(planned)) == 1:
        flags += [
            "--parallelism.pipeline_parallel_first_stage_less_layers 0",
            "--parallelism.pipeline_parallel_last_stage_less_layers 0",
            f"--parallelism.pipeline_parallel_layers_per_stage {planned[0]}",
        ]
        return Part(flags=tuple(flags))
    flags.append(f"--parallelism.module_fqns_per_model_part {' '.join(_modules(planned))}")
    notes = []
    if config.assignment.layers:
        notes.append("pp: the modules give each virtual stage the layers that were planned for it")
    if 0 in planned[1:-1]:
        notes.append("pp: torchtitan can't run a stage without layers, and the study planned some")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _modules(planned: tuple[int, ...]) -> list[str]:
    """The modules of each part, as decoders of torchtitan.models.common name them."""
    ends = list(accumulate(planned))
    parts = [[f"layers.{at}" for at in range(end - held, end)] for held, end in zip(planned, ends, strict=True)]
    parts[0] = ["tok_embeddings", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "lm_head"]
    return [",".join(part) or "''" for part in parts]


def _context(config: ParallelConfig) -> Part:
    note = f"up: torchtitan has no Ulysses attention; ring attention of cp*up = {config.cp * config.up} takes its place"
    return Part(
        flags=(f"--parallelism.context_parallel_degree {config.cp * config.up}",),
        notes=(note,) if config.up > 1 else (),
    )


def _experts(setting: Setting, config: ParallelConfig) -> Part:
    if not setting.job.model.is_moe:
        note = f"ep: {config.ep} has no meaning for a model without experts"
        return Part(notes=(note,) if config.ep > 1 else ())
    notes = []
    ranks = shards_of(config) * config.cp * config.up * config.tp
    if ranks % config.ep:
        notes.append(
            f"ep: torchtitan takes expert ranks from dp_shard*cp*tp = {ranks}, of which {config.ep} is no divisor"
        )
    if config.expert_tp not in (0, config.tp):
        notes.append(f"expert_tp: torchtitan has no tensor degree for experts alone; {config.expert_tp} is left out")
    return Part(flags=(f"--parallelism.expert_parallel_degree {config.ep}",), notes=tuple(notes))


def _precision(setting: Setting) -> Part:
    wanted = setting.job.precision
    single = wanted in ("fp32", "tf32")
    notes = {
        "fp16": "precision: torchtitan has no fp16; bf16 stands for it",
        "fp8": "precision: a recipe's model converters ask for fp8, no flag does",
        "nvfp4": "precision: a recipe's model converters ask for nvfp4, no flag does",
        "tf32": "precision: torchtitan has no flag for tf32; set torch.backends.cuda.matmul.allow_tf32",
    }
    return Part(
        flags=(f"--training.mixed_precision_param {'float32' if single else 'bfloat16'}",),
        notes=(notes[wanted],) if wanted in notes else (),
    )


def _recompute(setting: Setting, config: ParallelConfig) -> Part:
    note = (
        "recompute: torchtitan's selective keeps most products and all exchanges, and runs the rest again; it has no "
        f"name for {', '.join(setting.job.recompute_modules)}"
    )
    return Part(
        flags=(f"activation-checkpoint:{config.recompute}",),
        notes=(note,) if config.recompute == "selective" else (),
    )
