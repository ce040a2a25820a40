"""Trainer of one rank: it builds the rank's part of the model, and trains steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from trials.torch_training.model.attention import local_positions
from trials.torch_training.model.data import sequences
from trials.torch_training.model.data_parallel import replicate
from trials.torch_training.model.experts import Keep, keep_all
from trials.torch_training.model.gradients import finish_gradients
from trials.torch_training.model.loss import cross_entropy
from trials.torch_training.model.mesh import RankMesh
from trials.torch_training.model.pipeline import passes
from trials.torch_training.model.sharding import megatron_sharding
from trials.torch_training.model.stage_model import build_chunks
from trials.torch_training.optimizers import optimizer_of


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of a step, which is equal on all ranks.

    Attributes:
        loss: Mean loss over the tokens of the batch, before the step.
        gradient_norm: Global norm of the gradients, before clipping.
    """

    loss: float
    gradient_norm: float


class Trainer:
    """Trainer of one job under one configuration; every rank has one.

    Args:
        job: Training job.
        runtime: Profile of the framework, which divides the layers into stages.
        config: Configuration, which has as many devices as the process group has ranks.
        device: Device on which this rank computes.
        seed: Seed of weights and data.
        keep: Function that selects the tokens that experts take.
    """

    def __init__(
        self,
        job: TrainingJob,
        runtime: RuntimeProfile,
        config: ParallelConfig,
        device: torch.device,
        *,
        seed: int = 0,
        keep: Keep = keep_all,
    ) -> None:
        self._job, self._config = job, config
        self._mesh = mesh = RankMesh(config, device)
        self._sharding = megatron_sharding(sequence_parallel=config.sequence_parallel and config.tp > 1)
        self._chunks = build_chunks(job, runtime, config, mesh, self._sharding, seed=seed, keep=keep)
        replicas = replicate(
            self._chunks,
            mesh,
            zero_stage=config.zero_stage,
            precision=job.precision,
            num_micro_batches=job.global_batch_size // (config.dp * config.mbs),
        )
        self._passes = passes(job, config, mesh, replicas, self._loss_of)
        self._optimizer = optimizer_of(
            job.optimizer, (weight for chunk in self._chunks for weight in chunk.parameters())
        )
        # every rank draws the whole batch and keeps its replica's sequences and its own positions of them
        batch = sequences(job.model.vocab_size, job.sequence_length, job.global_batch_size, seed)
        own = batch.chunk(config.dp)[mesh.index("dp")]
        positions = local_positions(
            job.sequence_length, cp=config.cp, up=config.up, cp_rank=mesh.index("cp"), up_rank=mesh.index("up")
        )
        # the target of a position is the token after it
        self._tokens = own[:, positions].contiguous().to(device)
        self._targets = own[:, positions + 1].contiguous().to(device)

    def step(self) -> StepResult:
        """Train one optimizer step; all ranks end it together."""
        loss, norm = self.start_step()
        # all ranks of a tp group hold the same loss, so that each of them adds only its part of it
        losses = loss / self._config.tp
        dist.all_reduce(losses)
        return StepResult(loss=losses.item(), gradient_norm=norm.item())

    def start_step(self) -> tuple[Tensor, Tensor]:
        """Train one step without waiting for its results: this rank's share of the loss, and the gradients' norm."""
        loss = self._passes(self._tokens, self._targets)
        with record_function("@weights.gradients"):
            norm = finish_gradients(self._chunks, self._mesh, self._sharding)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _loss_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss over all tokens of the batch."""
        with record_function("@head.cross_entropy"):
            total = cross_entropy(
                logits,
                targets,
                vocab_size=self._job.model.vocab_size,
                first=self._mesh.index("tp") * logits.shape[-1],
                group=self._mesh.group("tp"),
            )
        return total / self._job.tokens_per_step
