"""What to set in a recipe of NeMo 2 (nemo_toolkit 2.7), as Python.

Sources: NeMo lightning/pytorch/strategies/megatron_strategy.py (arguments of `MegatronStrategy`; its
`ParallelismConfig` goes to megatron-core's ModelParallelConfig), collections/llm/recipes/*.py (where strategy, data and
model stand in a recipe), collections/llm/gpt/data/mock.py (batch and sequence), and for the model and the gradients'
reduction megatron-core transformer_config.py and distributed_data_parallel_config.py.
"""

from __future__ import annotations

import shlex

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, Values, read_flags
from tuner.export.megatron import megatron_parts
from tuner.export.megatron_flags import MEGATRON_FLAGS
from tuner.export.parts import comments, runtime_note

FIELDS = {
    "--tensor-model-parallel-size": "trainer.strategy.tensor_model_parallel_size",
    "--sequence-parallel": "trainer.strategy.sequence_parallel",
    "--pipeline-model-parallel-size": "trainer.strategy.pipeline_model_parallel_size",
    "--num-virtual-stages-per-pipeline-rank": "trainer.strategy.virtual_pipeline_model_parallel_size",
    "--pipeline-model-parallel-layout": "trainer.strategy.pipeline_model_parallel_layout",
    "--context-parallel-size": "trainer.strategy.context_parallel_size",
    "--cp-comm-type": "model.config.cp_comm_type",
    "--expert-model-parallel-size": "trainer.strategy.expert_model_parallel_size",
    "--expert-tensor-parallel-size": "trainer.strategy.expert_tensor_parallel_size",
    "--moe-token-dispatcher-type": "model.config.moe_token_dispatcher_type",
    "--moe-grouped-gemm": "model.config.moe_grouped_gemm",
    "--micro-batch-size": "data.micro_batch_size",
    "--global-batch-size": "data.global_batch_size",
    "--seq-length": "data.seq_length",
    "--use-distributed-optimizer": "optim.config.use_distributed_optimizer",
    "--num-distributed-optimizer-instances": "trainer.strategy.num_distributed_optimizer_instances",
    "--overlap-grad-reduce": "trainer.strategy.ddp.overlap_grad_reduce",
    "--overlap-param-gather": "trainer.strategy.ddp.overlap_param_gather",
    "--data-parallel-sharding-strategy": "trainer.strategy.ddp.data_parallel_sharding_strategy",
    "--use-megatron-fsdp": "trainer.strategy.ddp.use_megatron_fsdp",
    "--recompute-granularity": "model.config.recompute_granularity",
    "--recompute-modules": "model.config.recompute_modules",
    "--recompute-method": "model.config.recompute_method",
    "--recompute-num-layers": "model.config.recompute_num_layers",
}
"""Where a recipe holds what a flag of Megatron-LM says."""


ALWAYS: dict[str, FlagValue] = {
    "--sequence-parallel": False,
    "--num-virtual-stages-per-pipeline-rank": None,
    "--pipeline-model-parallel-layout": None,
    "--use-distributed-optimizer": False,
    "--num-distributed-optimizer-instances": 1,
    "--overlap-grad-reduce": False,
    "--overlap-param-gather": False,
    "--data-parallel-sharding-strategy": "no_shard",
    "--recompute-granularity": None,
    "--recompute-method": None,
    "--recompute-num-layers": None,
    "--use-megatron-fsdp": False,
}
"""What is set even where no flag says it, since recipes bring values of their own."""

DTYPES = {"bf16": "torch.bfloat16", "fp8": "torch.bfloat16", "nvfp4": "torch.bfloat16", "fp16": "torch.float16"}


def export_nemo(setting: Setting, config: ParallelConfig) -> Export:
    """A function that takes a recipe and sets what the configuration decides."""
    parts = megatron_parts(setting, config)
    said = read_flags([word for part in parts for flag in part.flags for word in shlex.split(flag)], MEGATRON_FLAGS)
    notes = [*(note for part in parts for note in part.notes), *_notes(setting, config)]
    notes += runtime_note(setting, "NeMo", ("megatron-core", "mindspeed"))
    lines = [f"{path} = {value}" for path, value in _assignments(setting, ALWAYS | said).items()]
    text = "\n".join(
        [
            *comments((str(config), f"dp={config.dp} follows from the world size", *notes)),
            "import torch",
            "",
            "",
            "def parallelise(recipe):",
            '    """Sets the configuration in a recipe, such as llm.llama3_8b.pretrain_recipe()."""',
            *(f"    recipe.{line}" for line in lines),
            "    return recipe",
        ]
    )
    return Export(target="nemo", text=text + "\n", notes=tuple(notes))


def _assignments(setting: Setting, said: Values) -> dict[str, str]:
    """Fields of the recipe, and what they become as Python."""
    groups = setting.cluster.groups
    found: dict[str, str] = {}
    if len({group.devices_per_host for group in groups}) == 1:
        found["trainer.num_nodes"] = str(sum(group.hosts for group in groups))
        found["trainer.devices"] = str(groups[0].devices_per_host)
    for flag, path in FIELDS.items():
        if flag in said:
            found[path] = _as_python(flag, said[flag])
    found["trainer.strategy.pipeline_dtype"] = DTYPES.get(setting.job.precision, "torch.float32")
    if said["--use-megatron-fsdp"]:
        found |= {
            "trainer.strategy.fsdp": repr("megatron"),
            "trainer.strategy.save_ckpt_format": repr("fsdp_dtensor"),
        }
    else:
        found["trainer.strategy.fsdp"] = "None"
    found["trainer.strategy.ddp.use_distributed_optimizer"] = found["optim.config.use_distributed_optimizer"]
    return found


def _as_python(flag: str, value: FlagValue) -> str:
    if flag == "--cp-comm-type" and isinstance(value, tuple):
        # the strategy makes no hierarchical groups
        return repr("p2p" if value[0] == "a2a+p2p" else value[0])
    return repr(list(value) if isinstance(value, tuple) else value)


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.cp > 1 and config.up > 1:
        notes.append(
            "up: MegatronStrategy makes no hierarchical groups for a2a+p2p; ring attention of cp*up = "
            f"{config.cp * config.up} takes its place"
        )
    if len({group.devices_per_host for group in setting.cluster.groups}) > 1:
        notes.append("hosts: hosts have unlike numbers of devices; set trainer.num_nodes and trainer.devices yourself")
    if job.precision != "bf16":
        notes.append(f"precision: recipe.trainer.plugins says it, and recipes bring bf16_mixed(), not {job.precision}")
    if job.optimizer != "adam":
        notes.append(f"optimizer: recipe.optim says it, and recipes bring Adam, not {job.optimizer}")
    return notes
