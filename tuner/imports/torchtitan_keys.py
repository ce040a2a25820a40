"""Keys of torchtitan's configuration that no reader asks for, in the sections about batch, layout and memory.

Sources: torchtitan 0.3.0 config/configs.py, and config/job_config.py of earlier versions, whose keys some forks keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.export.torchtitan_flags import NAMES_MODULES, TORCHTITAN_FLAGS, TORCHTITAN_MAIN_FLAGS
from tuner.imports.imported import Doubt

_WRITTEN = frozenset(
    flag.rpartition(".")[2].removeprefix("no_")
    for flag in (TORCHTITAN_FLAGS | TORCHTITAN_MAIN_FLAGS).keys() - NAMES_MODULES
)
"""Keys that exports write: the importer reads them, or they change nothing that a study has."""
_READ = frozenset(
    {
        *("data_parallel_degree", "pipeline_parallel_microbatches", "enable_async_tensor_parallel", "batch_size"),
        *("enable_fp8_linear", "fp8_linear", "mode"),
    }
)
"""Further keys that the importer reads, or tells that they are not modelled."""
_HARMLESS = frozenset(
    {
        *("steps", "max_norm", "warmup_steps", "seed", "deterministic", "dataset", "dataset_path"),
        *("data_parallel_type", "gc_freq", "gc_debug", "mixed_precision_reduce", "compile"),
        *("enable_compiled_autograd", "enable_loss_parallel", "disable_loss_parallel", "enable_fsdp_symm_mem"),
        *("spmd_backend", "custom_import", "custom_args_module", "context_parallel_load_balancer"),
        *("context_parallel_ptrr_mask_key", "context_parallel_rotate_method", "expert_parallel_a2a_impl"),
        *("debug_moe_force_load_balance", "preserve_rng_state", "determinism_check", "debug", "early_stop"),
        *("visualize_memory_budget", "per_op_sac_force_recompute_mm_shapes_by_fqns", "selective_ac_option"),
        "train_spec",
    }
)
"""Further keys that change nothing that a study has."""
_ASKED = {
    "dtype": ("keeps weights and optimizer states without fp32 copies, which is not modelled", ""),
    "enable_cpu_offload": ("keeps all states on the host, which is not modelled", ""),
    "expert_tensor_parallel_degree": ("splits experts otherwise than the rest", "expert_tp"),
    "module_fqns_per_model_part": ("names the layers of each stage, which are not read", ""),
    "pipeline_parallel_split_points": ("names the layers of each stage, which are not read", ""),
    "pipeline_parallel_schedule_csv": ("describes a schedule of its own, which is not modelled", ""),
    "memory_budget": ("chooses what is recomputed by a budget", "recompute"),
    "activation_memory_budget": ("chooses what is recomputed by a budget", "recompute"),
}
"""Known keys that change the layout or memory and are not read, with the reason and the key that may say it."""
_DEFAULTS = {"dtype": "float32"}
"""Values of such keys that change nothing."""
_SECTIONS = ("training", "parallelism", "experimental", "activation_checkpoint")


def doubts_about(mapping: Mapping[str, Any]) -> Iterator[Doubt]:
    """Yield a doubt for each key of the sections that may change the study and is not read."""
    for section in _SECTIONS:
        keys = mapping.get(section)
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            is_off = (
                value == _DEFAULTS.get(key, "")
                or value is None
                or value is False
                or value in ("", [])
                or (value == 1 and value is not True)
            )
            if is_off or key in _WRITTEN | _READ | _HARMLESS:
                continue
            why, of_study = _ASKED.get(key, ("not known to any version of torchtitan", ""))
            yield Doubt(flag=f"--{section}.{key}", why=why, key=of_study)
