"""Exporter for Megatron-SWIFT (`megatron sft` and `megatron pt` of ms-swift).

Sources: ms-swift (main of August 2026) swift/megatron/arguments/megatron_args.py (names and defaults; switches have a
value), megatron_base_args.py (`seq_length` is max_length), sft_args.py.
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue
from tuner.export.megatron_flags import (
    COMM,
    EXPERT_TP,
    FSDP2,
    KEEPS_WEIGHTS,
    LAYOUT,
    LEVELS,
    MEGATRON_FLAGS,
    SEQUENCE,
    VPP,
    underscored,
)
from tuner.export.renamed import COUNTS_EMBEDDING, COUNTS_LOSS, FIRST, LAST, Program, export_renamed

_LACKING = frozenset(
    {
        *(FSDP2, KEEPS_WEIGHTS, LEVELS, "--num-distributed-optimizer-instances", "--overlap-cpu-optimizer-d2h-h2d"),
        *("--sft", "--outer-dp-sharding-strategy", "--no-gradient-accumulation-fusion", "--ckpt-format"),
        *("--bf16", "--fp16", "--optimizer", "--fp8-format", "--fp4-format", "--fp4-recipe"),
        *("--moe-token-dispatcher-type", "--moe-grouped-gemm", "--overlap-grad-reduce", "--overlap-param-gather"),
    }
)
"""Flags that it lacks, or that no configuration decides."""


def _words(key: str, value: FlagValue) -> tuple[str, ...]:
    if value is None:  # its default but for one option
        return ("--recompute_granularity", "none") if key == "recompute_granularity" else ()
    values = value if isinstance(value, tuple) else (value,)
    return (f"--{key}", *(str(one).lower() if isinstance(one, bool) else str(one) for one in values))


SWIFT = Program(
    target="swift",
    title="Megatron-SWIFT",
    versions="ms-swift 4",
    keys={flag: (underscored(flag),) for flag in MEGATRON_FLAGS if flag not in _LACKING}
    | {
        SEQUENCE: ("max_length",),
        VPP: ("virtual_pipeline_model_parallel_size",),
        **{flag: (underscored(flag),) for flag in (FIRST, LAST, COUNTS_EMBEDDING, COUNTS_LOSS)},
        COMM: ("cp_comm_type",),
        LAYOUT: ("pipeline_model_parallel_layout",),
        EXPERT_TP: ("expert_tensor_parallel_size",),
    },
    words=_words,
    off={"--use-megatron-fsdp": False, "--optimizer-cpu-offload": False},
    connections="32",  # it sets 1 where the variable is absent, and refuses that
    usage='megatron sft --model ... "${SWIFT_SETTINGS[@]}"',
)
"""Settings of Megatron-SWIFT."""


def export_swift(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of options, which `megatron sft` or `megatron pt` is called with."""
    return export_renamed(SWIFT, setting, config)
