"""The flags of Megatron-LM's pretrain scripts (megatron-core 0.16).

Sources: Megatron-LM megatron/training/arguments.py (names and checks) and megatron-core 0.16.1
model_parallel_config.py (hierarchical context parallel sizes: all-to-all first), distributed_data_parallel_config.py
(sharding strategies), distrib_optimizer.py (Adam only), transformer/pipeline_parallel_layer_layout.py (the layout's
grammar); its Megatron-FSDP guide for the flags that sharded gradients and weights need beside them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import groupby

from costmodels.assignment import numbers_in_words
from costmodels.parallel import ParallelConfig
from costmodels.schedules import assign_layers
from tuner.export.exporter import Export
from tuner.rules import Setting

ARRAY = "PARALLEL_ARGS"
"""Name of the bash array that the text defines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Flags of one concern, one per line, and what they cannot say."""

    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def export_megatron(setting: Setting, config: ParallelConfig) -> Export:
    """A bash array of flags, to stand before the call of a pretrain script and be handed to it."""
    parts = [
        _tensor(setting, config),
        _pipeline(setting, config),
        _uneven(setting, config),
        _context(setting, config),
        _experts(setting, config),
        _batch(setting, config),
        _data_parallel(setting, config),
        _recompute(setting, config),
        _precision(setting, config),
    ]
    model_parallel = config.tp * config.pp * config.cp * config.up
    lines = [
        f"# {config}",
        f"# dp={config.dp} follows from the world size: {config.num_devices} devices / "
        f"(tp*pp*cp*up = {model_parallel})",
        *(
            f"unset {name}" if value is None else f"export {name}={value}"
            for name, value in _environment(setting, config)
        ),
        f"{ARRAY}=(",
        *(f"    {flag}" for part in parts for flag in part.flags),
        ")",
        f'# torchrun ... pretrain_gpt.py "${{{ARRAY}[@]}}" ...',
    ]
    notes = tuple(note for part in parts for note in part.notes)
    if setting.runtime.name not in ("megatron-core", "mindspeed"):
        notes += (
            f"runtime: the study is about {setting.runtime.name}; these flags are Megatron-LM's, which may rank "
            "configurations otherwise",
        )
    return Export(
        target="megatron",
        text="\n".join(lines) + "\n",
        notes=notes,
        arguments=tuple(word for part in parts for flag in part.flags for word in shlex.split(flag)),
        environment=_environment(setting, config),
    )


def _sharded_stage(setting: Setting, config: ParallelConfig) -> int:
    """The ZeRO stage that Megatron-LM can run: the distributed optimizer knows Adam only."""
    return config.zero_stage if setting.job.optimizer == "adam" else 0


def _environment(setting: Setting, config: ParallelConfig) -> tuple[tuple[str, str | None], ...]:
    """arguments.py asserts the variable for tp or cp on devices before Blackwell, and its absence for Megatron-FSDP."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if _sharded_stage(setting, config) >= 2:
        return ((name, None),)
    return ((name, "1"),) if config.tp * config.cp * config.up > 1 else ()


def _exports(setting: Setting, config: ParallelConfig) -> list[str]:
    """The same as lines of bash."""
    variables = _environment(setting, config)
    return [f"unset {name}" if value is None else f"export {name}={value}" for name, value in variables]


def _tensor(setting: Setting, config: ParallelConfig) -> _Part:
    flags = [f"--tensor-model-parallel-size {config.tp}"]
    notes = []
    if config.sequence_parallel and config.tp > 1:
        flags.append("--sequence-parallel")
    if setting.job.model.is_moe and config.tp > 1 and not config.sequence_parallel:
        notes.append("sequence_parallel: Megatron-LM trains experts with tp > 1 only with --sequence-parallel")
    return _Part(flags=tuple(flags), notes=tuple(notes))


def _pipeline(setting: Setting, config: ParallelConfig) -> _Part:
    """Even stages by their number, others by a layout, which implies vpp and excludes the flag for it."""
    layers, padded = setting.job.model.num_layers, setting.padded_layers
    size = f"--pipeline-model-parallel-size {config.pp}"
    chunks = config.pp * config.vpp
    if config.assignment.layers:
        note = "pp: the layout gives each virtual stage the layers that were planned for it"
        layout = _layout(list(config.assignment.layers))
        return _Part(flags=(size, f"--pipeline-model-parallel-layout '{layout}'"), notes=(note,))
    if layers % chunks == 0:
        virtual = (f"--num-virtual-stages-per-pipeline-rank {config.vpp}",) if config.vpp > 1 else ()
        notes = (
            ()
            if padded == layers or chunks == 1
            else (
                f"pp: the study pads {layers} layers to {padded} with no-op layers; Megatron-LM has none and cuts the "
                f"{layers} layers into {chunks} equal parts instead",
            )
        )
        return _Part(flags=(size, *virtual), notes=notes)
    stages = assign_layers(setting.job.model, setting.runtime, chunks, 1)
    note = (
        f"{'vpp' if config.vpp > 1 else 'pp'}: {layers} layers do not divide by pp*vpp = {chunks}; "
        f"--pipeline-model-parallel-layout gives each of the {chunks} parts the layers it had in the study"
    )
    if padded != layers:
        note += (
            f", where no-op layers filled them to {padded} (Megatron-LM has none; MindSpeed takes "
            f"--num-layers {padded} --noop-layers {','.join(map(str, range(layers, padded)))})"
        )
    if config.vpp > 1:
        note += f"; the layout implies vpp={config.vpp}"
    layout = _layout([int(count) for count in stages.dense + stages.moe])
    return _Part(flags=(size, f"--pipeline-model-parallel-layout '{layout}'"), notes=(note,))


def _uneven(setting: Setting, config: ParallelConfig) -> _Part:
    """What no flag tells of uneven work: the order of hosts, and what Megatron-LM cannot do."""
    given, cluster = config.assignment, setting.cluster
    notes = []
    if given.hosts:
        kinds = [group.name for group in cluster.groups for _ in range(group.hosts)]
        order = [f"{len(list(run))} x {kind}" for kind, run in groupby(kinds[host] for host in given.hosts)]
        notes.append(f"hosts: give node ranks in the order {numbers_in_words(given.hosts)} ({', then '.join(order)})")
    if given.recomputed:
        notes.append(
            "recomputed: Megatron-LM recomputes as many layers on every stage; --recompute-method block "
            f"--recompute-num-layers {max(given.recomputed)} fits wherever the plan does, and takes longer"
        )
    if given.micro_batches:
        notes.append(
            f"micro_batches: Megatron-LM gives every replica as many; {numbers_in_words(given.micro_batches)} needs a "
            "sampler of your own"
        )
    return _Part(notes=tuple(notes))


def _layout(layers_of_part: list[int]) -> str:
    """E embedding, t*n layers (t for one), L loss; parts in the order that a micro-batch passes them."""
    parts = [("t" if count == 1 else f"t*{count}") if count else "" for count in layers_of_part]
    return f"E{'|'.join(parts)}L"


def _context(setting: Setting, config: ParallelConfig) -> _Part:
    """Ulysses and ring attention share one group: all-to-all within `up` neighbours, the ring across them."""
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
            f"{'cp' if config.cp > 1 else 'up'}: Megatron-LM needs a sequence length divisible by 2*cp*up = "
            f"{2 * size}, and it is {setting.job.sequence_length}"
        )
    return _Part(flags=tuple(flags), notes=tuple(notes))


def _experts(setting: Setting, config: ParallelConfig) -> _Part:
    if not setting.job.model.is_moe:
        note = f"ep: {config.ep} has no meaning for a model without experts"
        return _Part(notes=(note,) if config.ep > 1 else ())
    flags = (
        f"--expert-model-parallel-size {config.ep}",
        f"--expert-tensor-parallel-size {config.expert_tp or config.tp}",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
    )
    refused = config.ep > 1 and setting.job.precision == "fp16"
    return _Part(flags=flags, notes=("ep: Megatron-LM refuses expert parallelism in fp16",) if refused else ())


def _batch(setting: Setting, config: ParallelConfig) -> _Part:
    job = setting.job
    return _Part(
        flags=(
            f"--micro-batch-size {config.mbs}",
            f"--global-batch-size {job.global_batch_size}",
            f"--seq-length {job.sequence_length}",
        )
    )


def _data_parallel(setting: Setting, config: ParallelConfig) -> _Part:
    """ZeRO 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP; dp_shard makes several instances of either."""
    runtime, stage = setting.runtime, _sharded_stage(setting, config)
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
    if config.dp * config.cp * config.up > 1 and runtime.overlaps_gradients:
        flags.append("--overlap-grad-reduce")
        if stage and runtime.overlaps_weight_gather:
            flags.append("--overlap-param-gather")
    note = f"zero_stage: Megatron-LM shards the states of Adam only, not of {setting.job.optimizer}"
    return _Part(flags=tuple(flags), notes=(note,) if stage < config.zero_stage else ())


def _recompute(setting: Setting, config: ParallelConfig) -> _Part:
    modules = " ".join(setting.job.recompute_modules)
    flags = {
        "none": (),
        "selective": ("--recompute-granularity selective", f"--recompute-modules {modules}"),
        "full": ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
    }
    return _Part(flags=flags[config.recompute])


def _precision(setting: Setting, _: ParallelConfig) -> _Part:
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
    return _Part(
        flags=(*numerics[job.precision], f"--optimizer {job.optimizer}"),
        notes=(note,) if job.precision == "tf32" else (),
    )
