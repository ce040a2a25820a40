"""Models of transformers that train as planned in its Trainer and in loops of Accelerate.

    plan = plan_torch(model, batch, loss=lambda model, batch: model(**batch).loss, mesh={"data": 2})
    trainer = Trainer(model=for_trainer(plan.parallelize(model)), args=arguments, train_dataset=examples)

Trainer deals out each batch to the ranks, and the planned step takes the parts as one batch. Trainer takes the model
for one that `from_pretrained(distributed_config=DistributedConfig(fsdp_size=...))` has sharded: it does not wrap it,
and gathers its state to save it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.modeling_outputs import CausalLMOutput

from costmodels.sharding.exports.torch_modules import PlannedModule
from hardware.io.errors import ConfigError

NUM_ITEMS = "num_items_in_batch"
"""Input by which Trainer tells how many labels of an update count, on all ranks and in all its micro-batches."""


def for_trainer(planned: PlannedModule) -> torch.nn.Module:
    """Return a planned model itself, calls of which compute the planned loss of the parts of a batch that ranks have.

    The model must have been planned on one batch, a dict of its inputs. Its class, configuration and signature stay.
    Calls return an output with the loss alone.

    Args:
        planned: Planned model of transformers on a mesh of all ranks.

    Raises:
        ConfigError: It is no model of transformers, its transformers has no models that shard themselves, or there are
            more ranks than the mesh has.
    """
    model: Any = planned.module_planned
    if not hasattr(type(model), "is_distributed_loading_by_transformers"):
        raise ConfigError(
            "is no model of transformers 5.24 or later",
            key="module",
            value=type(model).__name__,
            nearest="call what parallelize returns in a loop of your own",
        )
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor), "parameters of a planned module are DTensors"
    num_ranks, size = torch.distributed.get_world_size(), parameter.device_mesh.size()
    if num_ranks != size:
        raise ConfigError("must have all ranks", key="device_mesh", value=size, nearest=f"{num_ranks} are here")

    @wraps(model.forward)  # Trainer reads the signature
    def forward(**batch: Any) -> CausalLMOutput:
        loss = planned(planned.joined(batch))
        # Trainer multiplies such a loss by the number of ranks, whose gradients it expects to be averaged.
        return CausalLMOutput(loss=loss / num_ranks if NUM_ITEMS in batch else loss)

    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = DistributedConfig(fsdp_size=num_ranks)
    planned.replace_forward(forward)
    return planned.module_planned
