"""Stages of one pipeline with tensor parallel degrees of their own.

A configuration's tp, dp and mbs are those of its first stage. All stages have equally many devices, and each
micro-batch passes through all of them whole. A stage with t times the tensor degree therefore has a t-th of the data
parallel replicas, and each replica has micro-batches t times as large. Every stage is priced as in a pipeline in which
all stages have its degrees: its variant.

Between stages of unlike degrees every rank sends as many bytes as between like ones, because each holds an equal part
of the micro-batch (sequence parallelism splits it over tp). But a rank sends its part in slices, one to each rank that
needs some of it, one after the other, so that every further slice costs a latency.

Source: FlagScale's heterogeneous training, flagscale/train/hetero/parallel_context.py (process meshes with degrees of
their own, get_inter_mesh_tensor_slices), p2p_communication.py (slices sent in turn), and its arguments (micro-batches
of a mesh, sequence parallelism between unlike tensor degrees, no virtual pipeline).
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.step.weights.traffic import WeightTraffic


def stage_variants(config: ParallelConfig) -> dict[int, ParallelConfig]:
    """Return the configuration in which all stages have the degrees of some, by tp, the first stage's first."""
    return {tp: _variant(config, tp) for tp in dict.fromkeys(config.assignment.stage_tp or (config.tp,))}


def widest_variant(config: ParallelConfig) -> ParallelConfig:
    """Return the variant with the largest tp, whose replicas hold whole replicas of all other stages."""
    return _variant(config, max(config.assignment.stage_tp or (config.tp,)))


def _variant(config: ParallelConfig, tp: int) -> ParallelConfig:
    assignment = replace(config.assignment, stage_tp=())
    dp, mbs = config.dp * config.tp // tp, config.mbs * tp // config.tp
    return replace(config, tp=tp, dp=dp, mbs=mbs, assignment=assignment)


def variants_of_stages(config: ParallelConfig) -> tuple[int, ...]:
    """Return the position of each stage's variant in `stage_variants` [pp]."""
    numbers = {tp: number for number, tp in enumerate(stage_variants(config))}
    return tuple(numbers[tp] for tp in config.assignment.stage_tp or (config.tp,) * config.pp)


def stage_tp_error(job: TrainingJob, config: ParallelConfig) -> str | None:
    """Explain why the tensor degrees of a configuration's stages cannot work; None if they can, or none are given."""
    given = config.assignment.stage_tp
    if not given:
        return None
    checks = (
        (len(given) != config.pp, f"stage_tp must name {config.pp} degrees, one per stage"),
        (0 in given, "stage_tp must be at least 1"),
        (given[0] != config.tp, f"stage_tp must begin with tp={config.tp}: the degrees are those of the first stage"),
        (config.vpp > 1, "stage_tp needs vpp=1"),
        (bool(config.assignment.micro_batches), "stage_tp cannot be combined with micro_batches"),
        (job.model.is_moe, "stage_tp is for models without experts"),
        (not config.sequence_parallel and len(set(given)) > 1, "stage_tp needs sequence_parallel"),
        (config.dp_shard > 0, "stage_tp cannot be combined with dp_shard"),
        (
            any((config.dp * config.tp) % tp or (config.mbs * tp) % config.tp for tp in given if tp),
            f"stage_tp must divide dp*tp={config.dp * config.tp}, and mbs times a stage's tp must be divisible by "
            f"tp={config.tp}",
        ),
        (
            job.model.tied_embeddings and given[0] != given[-1],
            "stage_tp must be the same on the first and the last stage, which share a tied table",
        ),
    )
    return next((reason for is_wrong, reason in checks if is_wrong), None)


def by_stage(of_variants: list[NDArray[Any]], number: tuple[int, ...]) -> NDArray[Any]:
    """Take each stage's row from the array of its variant [pp, k]."""
    return np.asarray(np.stack(of_variants)[np.array(number), np.arange(len(number))])


def traffic_by_stage(of_variants: list[WeightTraffic], number: tuple[int, ...]) -> WeightTraffic:
    """Take each stage's traffic from that of its variant."""
    return WeightTraffic(
        **{f.name: by_stage([getattr(one, f.name) for one in of_variants], number) for f in fields(WeightTraffic)}
    )


def most_slices(config: ParallelConfig) -> int:
    """Return the largest number of slices in which a rank sends its part of a micro-batch to the next stage."""
    degrees = config.assignment.stage_tp or (config.tp,)
    return max((slices_between(a, b) for a, b in itertools.pairwise(degrees)), default=1)


def slices_between(first_tp: int, second_tp: int) -> int:
    """Return the number of slices of a rank's message between stages of two tensor degrees."""
    # The sequence is cut finer on one side, and the samples on the other: a part of one side overlaps as many parts of
    # the other as the larger degree has of the smaller.
    low, high = sorted((first_tp, second_tp))
    return -(-high // low)


def has_unlike_stages(grid: ConfigGrid) -> NDArray[np.bool_]:
    """Return whether each configuration has stages with tensor degrees of their own [n]."""
    return np.array([bool(one.stage_tp) for one in grid.assignments], dtype=np.bool_)[grid.assignment]
