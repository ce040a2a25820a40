"""Forward and backward passes of one step: torch's pipeline schedules, or a plain loop for a single stage."""

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
"""Function that returns the loss of a micro-batch from this rank's logits [b, s, v] and targets [b, s]."""

Passes = Callable[[Tensor, Tensor], Tensor]
"""Function that runs all passes of a step on this rank's tokens and targets [n, s].

It returns the sum of the losses; 0 on ranks outside of the last stage.
"""


def passes(
    job: TrainingJob, config: ParallelConfig, mesh: RankMesh, chunks: Sequence[Replicated], loss_of: LossOf
) -> Passes:
    """Return the function that runs this rank's passes."""
    num_micro_batches, rest = divmod(job.global_batch_size, config.dp * config.mbs)
    assert not rest, f"dp {config.dp} times mbs {config.mbs} must divide the batch of {job.global_batch_size}"
    if config.pp == 1:
        return _accumulate(chunks[0], config.mbs, loss_of)
    stages: list[Any] = [_make_stage(job, config, mesh, chunk) for chunk in chunks]
    # each loss is divided by the tokens of the whole batch already, so that gradients must not be scaled again
    schedule: ScheduleInterleaved1F1B | ScheduleGPipe | Schedule1F1B
    if config.vpp > 1:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, loss_fn=loss_of, scale_grads=False)
    elif num_micro_batches < config.pp:  # without a steady state, 1F1B has no different order
        schedule = ScheduleGPipe(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    else:
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    is_first, is_last = mesh.index("pp") == 0, mesh.index("pp") == config.pp - 1

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        # tokens enter at the first stage, and only the last one computes losses
        arguments = (tokens,) if is_first else ()
        if is_last:
            schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step(*arguments, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=mesh.device)

    return run


def _accumulate(chunk: Replicated, mbs: int, loss_of: LossOf) -> Passes:
    """Return the passes of a single stage: a loop that accumulates gradients over micro-batches."""

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for inputs, wanted in zip(torch.split(tokens, mbs), torch.split(targets, mbs), strict=True):
            loss = loss_of(chunk(inputs), wanted)
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += loss.detach()
        return total

    return run


def _make_stage(job: TrainingJob, config: ParallelConfig, mesh: RankMesh, chunk: Replicated) -> PipelineStage:
    """Return a chunk as a stage of torch's schedules, with given shapes, so that no pass is run to infer them."""
    virtual, num_virtual = chunk.chunk.virtual, config.pp * config.vpp
    dtype = NARROW.get(job.precision, torch.float32)
    # on the meta device tensors have a shape and take no memory
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
