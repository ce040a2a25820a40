"""DeepSpeed as an oracle: its engine, built around a small model of its own layers, decides whether a layout runs.

DeepSpeed runs the programs of others, whose models have rules of their own: heads, widths, vocabularies and sequences
are those of GPT-NeoX, and are drawn so that they divide. What DeepSpeed itself decides is asked: its configuration file
as our exporter writes it, the topology of a pipeline, the groups of experts, and the engine that `deepspeed.initialize`
makes.
"""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.support.oracles import children, cuda
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import find_exporter


def deepspeed_oracle() -> Any:
    """Make the function that asks DeepSpeed.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    os.environ["DS_ACCELERATOR"] = "cuda"  # the CPU accelerator would compile its collectives first
    cuda.install()
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    axes = PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1).get_axis_names()

    def answer(setting: Setting, config: ParallelConfig) -> str | None:
        for name in ("cp", "up", "vpp"):
            if getattr(config, name) > 1:
                return f"PipeModelDataParallelTopology has the axes {axes} only, and no {name}"
        content = json.loads(find_exporter("deepspeed")(setting, config).text)
        for key in ("comments", "tensor_parallel", "expert_parallel"):  # the script's own layers take their place
            content.pop(key, None)
        world = setting.cluster.num_devices
        return children.on_ranks((0, world - 1), lambda rank: _run(content, setting, config, rank))

    return answer


def divisible(model: ModelSpec) -> ModelSpec:
    """Return a model whose sizes every tensor degree divides, for DeepSpeed does not look at them."""
    return model.changed(
        num_heads=96,
        num_kv_heads=96,
        hidden_size=768,
        ffn_size=96,
        vocab_size=96 * 32,
        **({"expert_ffn_size": 96} if model.is_moe else {}),
    )


def _run(content: dict[str, Any], setting: Setting, config: ParallelConfig, rank: int) -> None:
    """Be one rank of a layout until its engine is built."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

    children.join(setting.cluster.num_devices, rank)
    model = setting.job.model

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(
                8,
                torch.nn.Linear(8, 8),
                num_experts=model.num_experts,
                ep_size=config.ep,
                k=model.top_k,
                enable_expert_tensor_parallelism=True,
            )

        def forward(self, x: Any) -> Any:
            return self.moe(x)[0]

    with cuda.OnCpu():
        deepspeed.init_distributed(dist_backend="fake", dist_init_required=False, verbose=False)
        topology = PipeModelDataParallelTopology(num_pp=config.pp, num_mp=config.tp, num_dp=config.dp)
        deepspeed.utils.groups.mpu = PipelineParallelGrid(topology=topology)
        layers = [Experts() if model.is_moe else torch.nn.Linear(8, 8) for _ in range(model.num_layers)]
        pipelined = config.pp > 1
        module = (
            PipelineModule(layers, topology=topology, loss_fn=torch.nn.MSELoss())
            if pipelined
            else torch.nn.Sequential(*layers)
        )
        if config.ep > 1 and not model.is_moe:
            raise ValueError("without MoE layers there are no expert groups")
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(module.parameters()), "name": "all"}
        )
        deepspeed.initialize(
            model=module,
            config=content | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
            optimizer=torch.optim.Adam(groups, lr=1.0),
            mpu=None if pipelined else deepspeed.utils.groups.mpu,
        )
