"""Exporter for MaxText: settings `key=value` of its command.

MaxText cuts the batch over the axes data, fsdp and expert, and the weights over fsdp. The degree of an axis is the
product of one within a slice (`ici_`) and one across slices (`dcn_`). GPUs of a host are a slice, and so are all TPUs
of a cluster. A slice is filled in the order of AXES.

Sources: MaxText (main of August 2026) configs/base.yml (keys and defaults, mesh_axes, logical_axis_rules),
configs/types.py (global batch = per_device_batch_size * devices * gradient_accumulation_steps; stages * repeats *
layers of a stage = layers; micro-batches of a pipeline), layers/decoders.py (`get_remat_policy`), utils/max_utils.py
(`fill_unspecified_mesh_axes`: products within and across slices), context_parallel_strategy in configs/base.yml.
"""

from __future__ import annotations

import math
from fractions import Fraction

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER
from tuner.export.exporter import Export
from tuner.export.parts import (
    Part,
    closing_notes,
    describe_uneven_work,
    export_flags,
    num_micro_batches,
    optimizer_in,
    without_experts,
    without_optimizer,
)
from tuner.export.sequences import script_notes

ARRAY = "MAXTEXT_SETTINGS"
"""Name of the bash array that the exported text defines."""
VERSIONS = "MaxText of August 2026"
"""Versions of the framework that take the settings."""
NAMED = ("recompute", "zero_stage", "sequence_parallel", "dp_shard")
"""Further dimensions that the settings express."""
AXES = ("tensor", "tensor_sequence", "context_usp_ulysses", "context", "expert", "fsdp", "pipeline", "data")
"""Axes of the mesh that a configuration decides, from those that transfer most."""
POLICIES = {"none": "none", "selective": "minimal", "full": "full"}
"""Value of remat_policy for each kind of recomputation."""


def export_maxtext(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of settings, which MaxText's trainer is called with."""
    return export_flags(
        "maxtext",
        [
            _mesh(setting, config),
            _batch(setting, config),
            _pipeline(setting, config),
            _recompute(config),
            _optimizer(setting),
            describe_uneven_work(
                setting, config, framework="MaxText", recomputed="has one remat_policy for all layers"
            ),
            Part(notes=tuple(script_notes(setting, "MaxText"))),
        ],
        array=ARRAY,
        head=(str(config), f"Versions: {VERSIONS}"),
        usage=f'python3 -m maxtext.trainers.pre_train.train base.yml ... "${{{ARRAY}[@]}}"',
        notes=closing_notes(setting, config, "MaxText", rule_sets=("maxtext",), named=NAMED),
    )


def degrees_of_axes(config: ParallelConfig) -> dict[str, int]:
    """Return the degree of each axis. Expert parallel ranks are a part of the data parallel ones."""
    shards = config.dp_shard or config.dp
    ep = math.gcd(config.ep, shards)
    return {
        "data": config.dp // shards,
        "fsdp": shards // ep,
        "pipeline": config.pp,
        # one of the two alone is the axis `context`; both are the strategy `usp`
        "context": config.cp if config.cp > 1 else config.up,
        "context_usp_ulysses": config.up if config.cp > 1 else 1,
        "tensor": 1 if config.sequence_parallel else config.tp,
        "tensor_sequence": config.tp if config.sequence_parallel else 1,
        "expert": ep,
    }


def _mesh(setting: Setting, config: ParallelConfig) -> Part:
    """Return the degrees of all axes within a slice and across slices."""
    degrees = degrees_of_axes(config)
    group = setting.cluster.groups[0]
    left = config.num_devices if group.device.name.startswith("TPU") else group.devices_per_host
    flags, notes = [], []
    for axis in AXES:
        inner = math.gcd(degrees[axis], left)
        left //= inner
        flags += [f"ici_{axis}_parallelism={inner}", f"dcn_{axis}_parallelism={degrees[axis] // inner}"]
    if left > 1:
        notes.append(f"hosts: the degrees leave {left} devices of each host over, which no axis can take")
    if config.cp * config.up > 1:
        strategy = "usp" if config.cp > 1 and config.up > 1 else "ulysses" if config.up > 1 else "ring"
        flags.append(f"context_parallel_strategy={strategy}")
    if config.ep > 1 and not setting.job.model.is_moe:
        notes.append(without_experts(config))
    if config.zero_stage != 3 and config.dp > 1:
        notes.append(f"zero_stage: MaxText shards all states over fsdp; stage {config.zero_stage} is exported as 3")
    return Part(flags=tuple(flags), notes=tuple(notes))


def _batch(setting: Setting, config: ParallelConfig) -> Part:
    """Return the sequences of each device, which may be a fraction, and the rounds of accumulation.

    A pipeline takes all micro-batches of a step at once.
    """
    rounds = 1 if config.pp > 1 else num_micro_batches(setting, config)
    job = setting.job
    of_device = Fraction(job.global_batch_size, config.num_devices * rounds)
    return Part(
        flags=(
            f"per_device_batch_size={float(of_device)!r}",
            f"gradient_accumulation_steps={rounds}",
            f"max_target_length={job.sequence_length}",
        )
    )


def _pipeline(setting: Setting, config: ParallelConfig) -> Part:
    """Return the settings of a pipeline: vpp is the number of times that a micro-batch passes all stages."""
    if config.pp == 1:
        note = ("vpp: MaxText repeats stages only with a pipeline",) if config.vpp > 1 else ()
        return Part(notes=note)
    layers, rest = divmod(setting.job.model.num_layers, config.pp * config.vpp)
    flags = (
        f"num_pipeline_microbatches={num_micro_batches(setting, config)}",
        f"num_layers_per_pipeline_stage={layers}",
        f"num_pipeline_repeats={config.vpp}",
    )
    if rest or config.assignment.layers:
        return Part(flags=flags, notes=("pp: MaxText's stages have equal layers; the study's have not",))
    return Part(flags=flags)


def _optimizer(setting: Setting) -> Part:
    """Return the optimizer where it is not MaxText's default."""
    job = setting.job
    if job.optimizer == DEFAULT_OPTIMIZER:
        return Part()
    name = optimizer_in("maxtext", job)
    return Part(flags=(f"opt_type={name}",)) if name else Part(notes=(without_optimizer("maxtext", "MaxText", job),))


def _recompute(config: ParallelConfig) -> Part:
    note = (
        "recompute: remat_policy=minimal keeps the results of all matrix products but those of attention; name other "
        "tensors by remat_policy=custom"
    )
    return Part(
        flags=(f"remat_policy={POLICIES[config.recompute]}",), notes=(note,) if config.recompute == "selective" else ()
    )
