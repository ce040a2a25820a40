"""Exporter for NeMo 2 (nemo_toolkit 2.7), which writes a Python function that sets the fields of a recipe.

Sources: NeMo lightning/pytorch/strategies/megatron_strategy.py (arguments of `MegatronStrategy`; its
`ParallelismConfig` is passed to megatron-core's ModelParallelConfig), collections/llm/recipes/*.py (places of strategy,
data and model in a recipe), collections/llm/gpt/data/mock.py (batch and sequence), fine_tuning.py and
packed_sequence.py there (packed rows, of which a micro-batch has one); megatron-core transformer_config.py (model) and
distributed_data_parallel_config.py (reduction of gradients).
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from hardware.launched_hosts import launched
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, Values, read_flags
from tuner.export.hybrid_pattern import has_pattern
from tuner.export.megatron import NAMED, megatron_parts
from tuner.export.megatron_flags import FLAGS, MEGATRON_FLAGS, names_in
from tuner.export.parts import closing_notes, format_comments, set_optimizer, stated_facts
from tuner.export.sequences import order_notes

VERSIONS = "NeMo 2; checked with nemo_toolkit 2.7.3 and megatron-core 0.19.2"
"""Versions of the framework that take the recipe."""

FIELDS = names_in("nemo")
"""Field of a recipe that corresponds to each flag of Megatron-LM."""

ALWAYS = {flag: row.absent[0] for flag, row in FLAGS.items() if row.absent}
"""Values that are set even if the flag is absent, because recipes have their own default values."""

_PACKING_IMPORTS = (
    "import nemo_run as run",
    "from nemo.collections.llm.gpt.data.packed_sequence import PackedSequenceSpecs",
)
"""Imports of a recipe with packed sequences."""

DTYPES = {"bf16": "torch.bfloat16", "fp8": "torch.bfloat16", "nvfp4": "torch.bfloat16", "fp16": "torch.float16"}
"""Data type of the tensors between pipeline stages, by precision; torch.float32 for the others."""


def export_nemo(setting: Setting, config: ParallelConfig) -> Export:
    """Return a Python function that sets the fields of a recipe that the configuration determines."""
    sequences = setting.job.sequences
    plain = replace(setting, job=setting.job.largest, runtime=replace(setting.runtime, stated=(), offload_share=1.0))
    parts = [*megatron_parts(plain, config), stated_facts(setting, "nemo")]
    given = read_flags([word for part in parts for flag in part.flags for word in shlex.split(flag)], MEGATRON_FLAGS)
    notes = [*(note for part in parts for note in part.notes), *_notes(setting, config)]
    if sequences is not None:
        notes += [
            "sequences: use a recipe for fine-tuning, such as llm.llama3_8b.finetune_recipe()",
            *order_notes(sequences, "NeMo"),
        ]
    notes += closing_notes(setting, config, "NeMo", rule_sets=("megatron", "mindspeed"), named=NAMED)
    lines = [f"{path} = {value}" for path, value in _assignments(setting, config, ALWAYS | given).items()]
    text = "\n".join(
        [
            *format_comments(
                (str(config), f"dp={config.dp} follows from the world size", f"Versions: {VERSIONS}", *notes)
            ),
            *(_PACKING_IMPORTS if sequences is not None and sequences.is_packed else ()),
            "import torch",
            "",
            "",
            "def parallelise(recipe):",
            '    """Set the configuration in a recipe, such as llm.llama3_8b.pretrain_recipe()."""',
            *(f"    recipe.{line}" for line in lines),
            "    return recipe",
        ]
    )
    return Export(target="nemo", text=text + "\n", notes=tuple(notes))


def _assignments(setting: Setting, config: ParallelConfig, given: Values) -> dict[str, str]:
    """Return the fields of the recipe with their values as Python expressions."""
    groups = launched(setting.cluster.reordered(config.assignment.hosts)).groups
    found: dict[str, str] = {}
    if len({group.devices_per_host for group in groups}) == 1:
        found["trainer.num_nodes"] = str(sum(group.hosts for group in groups))
        found["trainer.devices"] = str(groups[0].devices_per_host)
    for flag, path in FIELDS.items():
        if flag in given:
            found[path] = _as_python(flag, given[flag])
    sequences = setting.job.sequences
    if sequences is not None and sequences.is_packed:
        # fine_tuning.py wants micro-batches of one packed row, which may be longer instead
        tokens = config.mbs * setting.job.sequence_length
        found |= {
            "data.micro_batch_size": "1",
            "data.global_batch_size": str(setting.job.global_batch_size // config.mbs),
        }
        found |= {"data.seq_length": str(tokens), "model.config.seq_length": str(tokens)}
        found["data.dataset_kwargs"] = repr({"pad_to_max_length": True})
        found["data.packed_sequence_specs"] = f"run.Config(PackedSequenceSpecs, packed_sequence_size={tokens})"
    found["trainer.strategy.pipeline_dtype"] = DTYPES.get(setting.job.precision, "torch.float32")
    if given["--use-megatron-fsdp"]:
        found |= {"trainer.strategy.fsdp": repr("megatron"), "trainer.strategy.save_ckpt_format": repr("fsdp_dtensor")}
    else:
        found["trainer.strategy.fsdp"] = "None"
    found["trainer.strategy.ddp.use_distributed_optimizer"] = found["optim.config.use_distributed_optimizer"]
    return found


def _as_python(flag: str, value: FlagValue) -> str:
    if flag == "--cp-comm-type" and isinstance(value, tuple):
        # MegatronStrategy creates no hierarchical groups, so that a2a+p2p is not available
        return repr("p2p" if value[0] == "a2a+p2p" else value[0])
    return repr(list(value) if isinstance(value, tuple) else value)


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.cp > 1 and config.up > 1:
        notes.append(
            "up: MegatronStrategy creates no hierarchical groups for a2a+p2p; ring attention over cp*up = "
            f"{config.cp * config.up} ranks replaces it"
        )
    if len({group.devices_per_host for group in setting.cluster.groups}) > 1:
        notes.append(
            "hosts: hosts have different numbers of devices; set trainer.num_nodes and trainer.devices yourself"
        )
    if has_pattern(job.model) and (config.vpp > 1 or config.assignment.layers or job.model.num_layers % config.pp):
        notes.append("pp: the pattern of a recipe's hybrid model has no bars, which would divide its layers so")
    if setting.runtime.torch_fsdp2:
        notes.append("sharding: MegatronStrategy runs no FSDP2 of PyTorch; nothing is sharded")
    if job.precision != "bf16":
        notes.append(f"precision: recipes use bf16_mixed(); set recipe.trainer.plugins for {job.precision} yourself")
    notes += set_optimizer("megatron", "Megatron", job, "recipes use Adam; set recipe.optim for {name} yourself")
    return notes
