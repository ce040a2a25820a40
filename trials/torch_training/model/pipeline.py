"""The passes of one step: by torch's pipeline schedules, or a plain loop where there is one stage only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from trials.torch_training.model.data_parallel import NARROW, Replicated
from trials.torch_training.model.mesh import RankMesh
from trials.torch_training.model.stage_model import activation_shape

LossOf = Callable[[Tensor, Tensor], Tensor]
"""The loss of a micro-batch, given this rank's logits [b, s, v] and targets [b, s]."""

Passes = Callable[[Tensor, Tensor], Tensor]
"""All passes of a step, given tokens and targets [n, s] of this rank; the sum of its losses, 0 off the last stage."""


def passes(
    job: TrainingJob, config: ParallelConfig, mesh: RankMesh, chunks: Sequence[Replicated], loss_of: LossOf
) -> Passes:
    """The passes of this rank."""
    num_micro_batches, rest = divmod(job.global_batch_size, config.dp * config.mbs)
    assert not rest, f"dp {config.dp} times mbs {config.mbs} divides the batch of {job.global_batch_size}"
    if config.pp == 1:
        return _accumulation(chunks[0], config.mbs, loss_of)
    stages: list[Any] = [_stage(job, config, mesh, chunk) for chunk in chunks]
    schedule: ScheduleInterleaved1F1B | ScheduleGPipe | Schedule1F1B
    if config.vpp > 1:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss_of, scale_grads=False)
    elif num_micro_batches < config.pp:  # no steady state, in which 1F1B would be another order
        schedule = ScheduleGPipe(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    is_first, is_last = mesh.index("pp") == 0, mesh.index("pp") == config.pp - 1

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        arguments = (tokens,) if is_first else ()
        if is_last:
            schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(*arguments, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=mesh.device)

    return run


def _accumulation(chunk: Replicated, mbs: int, loss_of: LossOf) -> Passes:
    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for inputs, wanted in zip(torch.split(tokens, mbs), torch.split(targets, mbs), strict=True):
            loss = loss_of(chunk(inputs), wanted)
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += loss.detach()
        return total

    return run


def _stage(job: TrainingJob, config: ParallelConfig, mesh: RankMesh, chunk: Replicated) -> PipelineStage:
    """A chunk as torch's schedules know it; shapes are told, so that no pass is run to find them."""
    virtual, num_virtual = chunk.chunk.virtual, config.pp * config.vpp
    dtype = NARROW.get(job.precision, torch.float32)
    passed = torch.empty(activation_shape(job, config), dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty((config.mbs, job.sequence_length // (config.cp * config.up)), dtype=torch.long, device="meta")
    return PipelineStage(
        chunk,
        virtual,
        num_virtual,
        mesh.device,
        input_args=tokens if virtual == 0 else passed,
        output_args=passed,
        group=mesh.group("pp"),
    )
