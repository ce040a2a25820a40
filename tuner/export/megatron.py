"""Exporter for the flags of Megatron-LM's pretrain scripts (megatron-core 0.16 to 0.19).

Sources: Megatron-LM megatron/training/arguments.py (names and checks) and megatron-core 0.16.1
model_parallel_config.py (hierarchical context parallel sizes: all-to-all first), distributed_data_parallel_config.py
(sharding strategies), distrib_optimizer.py (Adam only), transformer/pipeline_parallel_layer_layout.py (grammar of
layouts), optimizer/cpu_offloading/README.md (flags of an offloaded optimizer), and the Megatron-FSDP guide (further
flags that sharded gradients and weights require).
"""

from __future__ import annotations

import shlex

import numpy as np

from costmodels.job.fact_words import written_words
from costmodels.job.facts import FactValue
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import FSDP2_STAGE, RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.pipeline.schedules import mtp_part, of_round
from tuner.export.exporter import Export
from tuner.export.hybrid_pattern import has_pattern, pattern_of
from tuner.export.megatron_flags import FSDP2, KEEPS_WEIGHTS, MTP, OF_ROUND, PATTERN
from tuner.export.megatron_refused import refused_flags
from tuner.export.parts import (
    HOST_MEMORY,
    Environment,
    Part,
    closing_notes,
    describe_uneven_work,
    export_flags,
    layers_of_parts,
    num_micro_batches,
    optimizer_in,
    stated_facts,
    without_experts,
    without_optimizer,
)
from tuner.export.sequences import megatron_sequences

ARRAY = "PARALLEL_ARGS"
"""Name of the bash array that the exported text defines."""

VERSIONS = "Megatron-LM of megatron-core 0.16 to 0.19; checked with 0.16.1 and 0.19.2"
"""Versions of the framework that take the flags."""

NAMED = ("recompute", "offload", "zero_stage", "sequence_parallel", "expert_tp", "dp_shard", "recompute_layers")
"""Further dimensions that the flags express."""

BLOCK = (
    "recomputes the same number of layers on every stage; --recompute-method block --recompute-num-layers {most} "
    "needs no more memory than the plan, but takes longer"
)
"""Advice for configurations whose stages recompute different numbers of layers."""

_WITH_BF16 = ("bf16", "fp8", "nvfp4")
"""Precisions that need --bf16; fp8 and nvfp4 add a narrower format for matrix products."""


def export_megatron(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of flags, which a pretrain script is called with."""
    return export_flags(
        "megatron",
        [*megatron_parts(setting, config), megatron_facts(setting, config)],
        array=ARRAY,
        head=(*head_comments(config), f"Versions: {VERSIONS}"),
        usage=f'torchrun ... pretrain_gpt.py "${{{ARRAY}[@]}}" ...',
        environment=environment(config, sharded=_sharded_stage(setting, config) >= 2),
        stated=setting.runtime.stated,
        notes=closing_notes(setting, config, "Megatron-LM", rule_sets=("megatron", "mindspeed"), named=NAMED),
    )


def megatron_parts(setting: Setting, config: ParallelConfig) -> list[Part]:
    """Return the flags grouped by concern, each group with notes about what it cannot express."""
    return [
        tensor(setting, config),
        _pipeline(setting, config),
        describe_uneven_work(setting, config, framework="Megatron-LM", recomputed=block_note(setting, config)),
        _context(setting, config),
        experts(setting, config),
        batch(setting, config),
        megatron_sequences(setting, config),
        _data_parallel(setting, config),
        _offload(setting, config),
        _recompute(setting, config),
        _precision(setting, config),
    ]


def head_comments(config: ParallelConfig) -> tuple[str, str]:
    """Return the leading comments: the configuration, and how dp follows from the number of devices."""
    return (
        str(config),
        f"dp={config.dp} follows from the world size: {config.num_devices} devices / "
        f"(tp*pp*cp*up = {config.tp * config.pp * config.cp * config.up})",
    )


def _sharded_stage(setting: Setting, config: ParallelConfig) -> int:
    """Return the ZeRO stage that Megatron-LM can run with the job's optimizer; FSDP2 shards all."""
    if setting.runtime.torch_fsdp2:
        return config.zero_stage
    return OPTIMIZERS[setting.job.optimizer].sharded_stage("megatron", config.zero_stage)


def environment(config: ParallelConfig, *, sharded: bool) -> Environment:
    """Return the setting of CUDA_DEVICE_MAX_CONNECTIONS that arguments.py requires.

    The variable must be 1 with tp or cp on devices before Blackwell. It must be absent with Megatron-FSDP.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if sharded:
        return ((name, None),)
    return ((name, "1"),) if config.tp * config.cp * config.up > 1 else ()


def tensor(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of tensor and sequence parallelism."""
    flags = [f"--tensor-model-parallel-size {config.tp}"]
    notes = []
    if config.sequence_parallel and config.tp > 1:
        flags.append("--sequence-parallel")
    if setting.job.model.is_moe and config.tp > 1 and not config.sequence_parallel:
        notes.append("sequence_parallel: Megatron-LM requires --sequence-parallel to train experts with tp > 1")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _pipeline(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of pipeline parallelism.

    Stages of equal length are given by their number. Any other division needs a layout, which implies vpp and excludes
    the flag for vpp. The pattern of a hybrid model says its stages itself, and excludes both.
    """
    layers, chunks = setting.job.model.num_layers, config.pp * config.vpp
    flags = [f"--pipeline-model-parallel-size {config.pp}"]
    notes = []
    is_hybrid = has_pattern(setting.job.model)
    if is_hybrid:
        pattern = pattern_of(setting.job.model, layers_of_parts(setting, config))
        flags.append(f"{PATTERN} {shlex.quote(pattern)}")
    elif config.assignment.layers or layers % chunks:
        layout = layout_of(layers_of_parts(setting, config), setting.job.model.num_mtp_layers)
        flags.append(f"--pipeline-model-parallel-layout '{layout}'")
        notes.append(_why_layout(setting, config))
    elif config.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {config.vpp}")
    if setting.padded_layers != layers and not layers % chunks and chunks > 1 and not is_hybrid:
        notes.append(
            f"pp: the study pads {layers} layers to {setting.padded_layers} with no-op layers; Megatron-LM has no such "
            f"layers and splits the {layers} layers into {chunks} equal parts instead"
        )
    rounds = int(of_round(np.array(num_micro_batches(setting, config)), config.pp))
    if config.vpp > 1 and rounds > config.pp:
        flags.append(f"{OF_ROUND} {rounds}")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _why_layout(setting: Setting, config: ParallelConfig) -> str:
    """Return the note on a layout: why there is one, and what the command must agree with."""
    layers, padded, modules = (setting.job.model.num_layers, setting.padded_layers, setting.job.model.num_mtp_layers)
    chunks = config.pp * config.vpp
    if config.assignment.layers:
        note = "pp: the layout gives each virtual stage the number of layers that the study planned"
    else:
        note = (
            f"{'vpp' if config.vpp > 1 else 'pp'}: {layers} layers are not divisible by pp*vpp = {chunks}; "
            f"--pipeline-model-parallel-layout gives each of the {chunks} parts as many layers as in the study"
        )
        if padded != layers:
            note += (
                f", which padded the model to {padded} layers with no-op layers (Megatron-LM has none; the flags of "
                f"MindSpeed are --num-layers {padded} --noop-layers {','.join(map(str, range(layers, padded)))})"
            )
        if config.vpp > 1:
            note += f"; the layout implies vpp={config.vpp}"
    if modules:
        note += f"; its {'m' * modules} needs {MTP} {modules} beside it"
    return note


def layout_of(layers_of_part: tuple[int, ...], num_mtp_layers: int = 0) -> str:
    """Return the pipeline layout as text.

    E is the embedding, t*n are n layers (t for one layer), m is a module of multi-token prediction and L is the loss.
    Bars separate the virtual stages, in the order in which a micro-batch passes through them. Modules are beside the
    loss, or before it where the last two parts are without layers: no part of the two is then empty.
    """
    parts = [("t" if count == 1 else f"t*{count}") if count else "" for count in layers_of_part]
    parts[mtp_part(layers_of_part)] += "m" * num_mtp_layers
    return f"E{'|'.join(parts)}L"


def _context(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of context parallelism.

    Ulysses and ring attention share one group of cp*up ranks: the all-to-all runs among `up` neighbours, the ring
    across these sets of neighbours.
    """
    size = config.cp * config.up
    flags = [f"--context-parallel-size {size}"]
    notes = []
    if config.cp > 1 and config.up > 1:
        flags.append("--cp-comm-type a2a+p2p")
        flags.append(f"--hierarchical-context-parallel-sizes {config.up} {config.cp}")
    elif size > 1:
        flags.append(f"--cp-comm-type {'p2p' if config.cp > 1 else 'a2a'}")
    if size > 1 and setting.job.sequence_length % (2 * size):
        notes.append(
            f"{'cp' if config.cp > 1 else 'up'}: Megatron-LM requires a sequence length divisible by 2*cp*up = "
            f"{2 * size}; it is {setting.job.sequence_length}"
        )
    return Part(flags=tuple(flags), notes=tuple(notes))


def experts(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of expert parallelism, including the tensor parallel degree of the experts."""
    if not setting.job.model.is_moe:
        note = without_experts(config)
        return Part(notes=(note,) if config.ep > 1 else ())
    flags = (
        f"--expert-model-parallel-size {config.ep}",
        f"--expert-tensor-parallel-size {config.expert_tp or config.tp}",
        *written_words("megatron", [("dispatcher", _dispatcher(setting, config))]),
        # arguments.py: "Currently GroupedGEMM for MoE only supports bf16 dtype"
        *(("--moe-grouped-gemm",) if setting.job.precision in _WITH_BF16 else ()),
    )
    is_rejected = config.ep > 1 and setting.job.precision == "fp16"
    return Part(flags=flags, notes=("ep: Megatron-LM rejects expert parallelism in fp16",) if is_rejected else ())


def _dispatcher(setting: Setting, config: ParallelConfig) -> FactValue:
    """Return what sends tokens to their experts: as the study states it, else the all-to-all that profiles have.

    DeepEP asserts that a group of ranks holds the experts (megatron-core 0.19.2 moe/token_dispatcher.py).
    """
    stated = dict(setting.runtime.stated).get("dispatcher", "alltoall")
    is_alone = config.ep * (config.expert_tp or config.tp) == 1
    return "alltoall" if stated == "deepep" and is_alone else stated


WRITTEN_ELSEWHERE = (
    *("dispatcher", "overlaps_gradients", "overlaps_weight_gather", "offload_share", "sequence_parallel"),
    *("layer_split", "layer_padding", "expert_imbalance", "sharding"),
)
"""Facts that the flags of a layout express already, or that no flag may say: routing is balanced by force in benchmarks
only."""


def megatron_facts(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of the facts that the study states, and notes on those that the layout cannot have."""
    part, refused = stated_facts(setting, "megatron", elsewhere=WRITTEN_ELSEWHERE), refused_flags(config)
    lost = [flag for flag in part.flags if flag.split()[0] in refused]
    notes = tuple(f"{flag}: Megatron-LM refuses it with this layout" for flag in lost)
    return Part(flags=tuple(flag for flag in part.flags if flag not in lost), notes=(*part.notes, *notes))


def batch(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags for the micro-batch size, the global batch size and the sequence length."""
    job = setting.job
    return Part(
        flags=(
            f"--micro-batch-size {config.mbs}",
            f"--global-batch-size {job.global_batch_size}",
            f"--seq-length {job.sequence_length}",
        )
    )


def _data_parallel(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags of data parallelism.

    ZeRO 1 is the distributed optimizer; ZeRO 2 and 3 are Megatron-FSDP, or FSDP2 where the study says so. With
    dp_shard, each of several instances of the optimizer shards its states over dp_shard ranks.
    """
    runtime, stage = setting.runtime, _sharded_stage(setting, config)
    if runtime.torch_fsdp2 and stage >= FSDP2_STAGE:
        return _fsdp2(config)
    flags = ["--use-distributed-optimizer"] if stage else []
    copies = config.dp // config.dp_shard if config.dp_shard else 1
    if stage and copies > 1:
        flags.append(f"--num-distributed-optimizer-instances {copies}")
    if stage >= 2:
        flags += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {'optim_grads' if stage == 2 else 'optim_grads_params'}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
            *(("--outer-dp-sharding-strategy no_shard",) if copies > 1 else ()),
        ]
    flags += overlap_flags(runtime, config, is_sharded=stage > 0)
    note = (
        f"zero_stage: Megatron-LM can shard the states of {setting.job.optimizer} up to stage {stage} only, which is "
        "exported"
    )
    return Part(flags=tuple(flags), notes=(note,) if stage < config.zero_stage else ())


def _fsdp2(config: ParallelConfig) -> Part:
    """Return the flags of PyTorch's FSDP2, which excludes the distributed optimizer and needs no flag to overlap."""
    kept = (KEEPS_WEIGHTS,) if config.zero_stage == FSDP2_STAGE else ()
    is_partial = config.dp_shard not in (0, config.dp)
    return Part(
        flags=(FSDP2, *kept, "--no-gradient-accumulation-fusion", "--ckpt-format torch_dist"),
        notes=("dp_shard: FSDP2 of Megatron-LM shards over all replicas",) if is_partial else (),
    )


def overlap_flags(runtime: RuntimeProfile, config: ParallelConfig, *, is_sharded: bool) -> list[str]:
    """Return the flags of transfers of gradients and weights beside compute."""
    if config.dp * config.cp * config.up == 1 or not runtime.overlaps_gradients:
        return []
    gathers = is_sharded and runtime.overlaps_weight_gather
    return ["--overlap-grad-reduce", *(["--overlap-param-gather"] if gathers else [])]


def _offload(setting: Setting, config: ParallelConfig) -> Part:
    """Return the flags that keep the optimizer's states on the host, which the distributed optimizer alone can."""
    if config.offload == "none":
        return Part()
    if _sharded_stage(setting, config) != 1 or "megatron" not in OPTIMIZERS[setting.job.optimizer].offloaded_by:
        note = "offload: Megatron-LM offloads with the distributed optimizer only (ZeRO 1, Adam); nothing is exported"
        return Part(notes=(note,))
    return Part(
        flags=(
            "--optimizer-cpu-offload",
            f"--optimizer-offload-fraction {setting.runtime.offload_share:g}",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-precision-aware-optimizer",
        ),
        notes=(HOST_MEMORY,),
    )


def block_layers(setting: Setting, config: ParallelConfig) -> int:
    """Return the number of layers that the method `block` recomputes of each virtual stage; 0 if it says another thing.

    Stages with fewer layers recompute all of theirs; other parts of the layers must not be recomputed.
    """
    most = max(config.recomputed)
    held = layers_of_parts(setting, config)
    is_equal = all(again == min(most, number) for again, number in zip(config.recomputed, held, strict=True))
    return most if config.recompute == "none" and (is_equal or config.recompute_layers) else 0


def block_note(setting: Setting, config: ParallelConfig) -> str:
    """Return the clause on stages that recompute unlike numbers of layers; empty if the flags say what they do."""
    return "" if block_layers(setting, config) else BLOCK


def _recompute(setting: Setting, config: ParallelConfig) -> Part:
    if number := block_layers(setting, config):
        return Part(
            flags=("--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {number}")
        )
    modules = " ".join(setting.job.recompute_modules)
    named = (f"--recompute-modules {modules}",) if config.recompute == "selective" else ()
    return Part(flags=(*recompute_flags(setting, config), *named))


def recompute_flags(setting: Setting, config: ParallelConfig) -> tuple[str, ...]:
    """Return the flags of a kind of recomputation, without the modules of a selective one."""
    return {
        "none": (),
        "selective": ("--recompute-granularity selective",),
        "full": (
            *("--recompute-granularity full", "--recompute-method uniform"),
            f"--recompute-num-layers {setting.job.recompute_unit}",
        ),
    }[config.recompute]


def _precision(setting: Setting, _: ParallelConfig) -> Part:
    """Return the flags for the number format and the optimizer."""
    job = setting.job
    numerics = {
        "bf16": ("--bf16",),
        "fp16": ("--fp16",),
        "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
        "fp8": ("--bf16", "--fp8-format hybrid"),
        "tf32": (),
        "fp32": (),
    }
    note = "precision: Megatron-LM has no flag for tf32; set torch.backends.cuda.matmul.allow_tf32"
    optimizer = optimizer_part(job)
    return Part(
        flags=(*numerics[job.precision], *optimizer.flags),
        notes=(*optimizer.notes, *((note,) if job.precision == "tf32" else ())),
    )


def optimizer_part(job: TrainingJob) -> Part:
    """Return the flags that choose the optimizer. SGD has a momentum unless it is told to have none."""
    if job.optimizer == "plain_sgd":
        return Part(flags=("--optimizer sgd", "--sgd-momentum 0"))
    name = optimizer_in("megatron", job)
    return (
        Part(flags=(f"--optimizer {name}",))
        if name
        else Part(notes=(without_optimizer("megatron", "Megatron-LM", job),))
    )
