"""Training steps of torchtitan that run as planned in its own Trainer, by the two hooks that its configurations have.

    def step():  # the factory of a study
        return titan_step(config(), num_ranks=2)

    def planned():  # the function that torchtitan's --config names
        return for_titan(config(), load_plan(os.environ["PLAN"]))

`ModelSpec.parallelize_fn` makes the module's parameters DTensors as planned. The Trainer's forward pass only keeps its
inputs, and the loss, which gets the labels, runs the planned step: it is planned with the loss that the configuration
names. The Trainer deals each batch to all ranks, as in data parallelism, whatever the plan's mesh is.

Source: torchtitan 0.3, `trainer.py` (`_forward_backward_body`, `train_step`), `protocols/model_spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from costmodels.sharding.exports.torch_modules import PlannedModule
from hardware.io.errors import ConfigError
from tuner.planners.loaded_plan import LoadedPlan
from tuner.planners.torch_plans import mesh_of_ranks

BATCH = ("input", "positions", "labels", "valid_tokens")
"""Inputs of the planned step: token ids, their positions and labels [b, s], and the number of labels that count."""

Batch = dict[str, torch.Tensor]


def titan_step(config: Trainer.Config, *, num_ranks: int) -> tuple[torch.nn.Module, tuple[Batch], Callable[..., Any]]:
    """Return the training step of a configuration, as a study's factory does: the module on `meta`, a batch, the loss.

    Args:
        config: Configuration of torchtitan's Trainer.
        num_ranks: Number of ranks, each of which has a part of a batch.

    Raises:
        ConfigError: The configuration asks for what a planned step does not have.
    """
    _check(config)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        module = config.model_spec.model.build()
    return _applied(module, config), (_sample(config, num_ranks),), _loss_of(config.loss.build(compile_config=None))


def for_titan(config: Trainer.Config, plan: LoadedPlan) -> Trainer.Config:
    """Return a configuration of torchtitan whose Trainer trains as planned.

    Args:
        config: Configuration with which the step was planned.
        plan: Plan of `titan_step(config, ...)`.

    Raises:
        ConfigError: The configuration asks for what a planned step does not have.
    """
    _check(config)

    def parallelize(model: torch.nn.Module, *, parallel_dims: Any, **_: Any) -> torch.nn.Module:
        num_ranks = torch.distributed.get_world_size()
        dealt = parallel_dims.dp_replicate * parallel_dims.dp_shard
        if dealt != num_ranks:
            raise ConfigError(
                "must deal a part of each batch to every rank",
                key="parallelism",
                value=f"dp_replicate x dp_shard = {dealt}",
                nearest=f"data_parallel_shard_degree={num_ranks}, and 1 for all other degrees: the plan shards",
            )
        loss = _loss_of(config.loss.build(compile_config=None))
        mesh = mesh_of_ranks(plan.mesh, device_type)
        planned = plan.parallelize(_applied(model, config), _sample(config, num_ranks), loss=loss, device_mesh=mesh)
        planned.replace_forward(lambda tokens, **given: _Kept(planned=planned, batch={"input": tokens, **given}))
        return model

    return replace(config, model_spec=replace(config.model_spec, parallelize_fn=parallelize), loss=PlannedLoss.Config())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Kept:
    """Inputs of a step that has not run, in place of the predictions that the Trainer passes to its loss."""

    planned: PlannedModule
    batch: dict[str, torch.Tensor]


class PlannedLoss(BaseLoss):  # type: ignore[misc] # torchtitan has no types
    """Loss that runs the planned step on what the forward pass has kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc] # as above
        """Configuration without keys: the planned step has the loss."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """Make the loss; nothing is compiled."""

    def __call__(
        self, pred: _Kept, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a rank's share of the whole loss, which the Trainer adds up, with the gradients of the whole."""
        assert global_valid_tokens is not None, "the Trainer counts labels"
        given = {**pred.batch, "labels": labels, "valid_tokens": global_valid_tokens}
        loss = pred.planned(pred.planned.joined({name: given[name] for name in BATCH}))
        own: torch.Tensor = _Share.apply(loss, torch.distributed.get_world_size())  # type: ignore[no-untyped-call] # torch's
        return own, {}


class _Share(torch.autograd.Function):
    """Part of a loss that each of some ranks reports; gradients are those of the whole."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, num_ranks: int) -> torch.Tensor:  # noqa: ARG004 # torch's contract
        return loss / num_ranks

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004 # torch's contract
        return gradient, None


def _loss_of(fn: BaseLoss) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    def loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        predicted = module(batch["input"], positions=batch["positions"])
        found: torch.Tensor = fn(predicted, batch["labels"], batch["valid_tokens"])[0]
        return found

    return loss


def _sample(config: Trainer.Config, num_ranks: int) -> Batch:
    """Return a batch of all ranks, of which only shapes and types are read."""
    ids = torch.zeros(config.training.local_batch_size * num_ranks, config.training.seq_len, dtype=torch.int64)
    return {name: torch.tensor(1) if name == "valid_tokens" else ids for name in BATCH}


def _applied(module: torch.nn.Module, config: Trainer.Config) -> torch.nn.Module:
    """Let a module recompute what the configuration asks for, as torchtitan's own hooks do first."""
    if config.activation_checkpoint is not None:
        config.activation_checkpoint.build(dump_folder=config.dump_folder).apply(module)
    return module


def _check(config: Trainer.Config) -> None:
    """Check that nothing is asked for that a planned step does not have.

    Raises:
        ConfigError: Parameters are cast, the model is compiled, or the attention needs masks.
    """
    refused = {
        "training.mixed_precision_param": (config.training.mixed_precision_param, "float32"),
        "training.disable_cuda_graphs": (config.training.disable_cuda_graphs, True),
        "compile.enable": (config.compile.enable, False),
    }
    for key, (value, valid) in refused.items():
        if value != valid:
            raise ConfigError("is not what a planned step does", key=key, value=value, nearest=str(valid))
    attention = config.model_spec.model.first_attention
    if attention is not None and not isinstance(attention.inner_attention, ScaledDotProductAttention.Config):
        raise ConfigError(
            "needs masks of blocks, for which no rule of sharding is known",
            key="inner_attention",
            value=type(attention.inner_attention).__qualname__,
            nearest="torchtitan.models.common.attention.ScaledDotProductAttention.Config(), which is causal alone",
        )
