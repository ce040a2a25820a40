"""Runtime profile of a program that takes Megatron-LM's flags, chosen by the flags that only one framework has.

Sources: deepspeedai/Megatron-DeepSpeed and bigscience-workshop/Megatron-DeepSpeed megatron/arguments.py (add_deepspeed
and DeepSpeed's deepspeed.add_config_arguments), MindSpeed-LLM mindspeed_llm/training/arguments.py, Megatron-LM v2
megatron/arguments.py (flags that v4 and later versions no longer have).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from costmodels.job.runtime import UNKNOWN
from tuner.imports.flags import Flags

MINDSPEED = (
    "--context-parallel-algo",
    "--enable-zero3",
    "--first-k-dense-replace",
    "--geglu",
    "--gelu-tanh",
    "--moe-fb-overlap",
    "--moe-tp-extend-ep",
    "--multi-head-latent-attention",
    "--n-shared-experts",
    "--noop-layers",
    "--reuse-fp32-param",
    "--swap-attention",
    "--swap-optimizer",
    "--ulysses-degree-in-cp",
    "--use-ascend-coc",
    "--use-ascend-mc2",
    "--use-cp-send-recv-overlap",
    "--use-fused-ring-attention-update",
    "--use-fused-rmsnorm",
    "--use-fused-rotary-pos-emb",
    "--use-fused-swiglu",
)
"""Flags that only MindSpeed has; one of them selects the mindspeed runtime."""
DEEPSPEED = (
    "--deepspeed",
    "--deepspeed-activation-checkpointing",
    "--deepspeed-config",
    "--deepspeed-mpi",
    "--ds-inference",
    "--ds-sequence-parallel-size",
    "--moe-expert-parallel-size",
    "--no-pipeline-parallel",
    "--zero-stage",
)
"""Flags that only programs on DeepSpeed have."""
_FITTED_WITHOUT_FSDP = (
    "the profile megatron-core was fitted to runs without FSDP: how far ZeRO 2 and 3 are off is not known"
)
_OLD = ("--DDP-impl", "--activations-checkpoint-method", "--checkpoint-activations", "--model-parallel-size")
"""Flags that Megatron-LM dropped in version 3 or 4."""


def runtime_of(
    flags: Flags, degrees: Mapping[str, int], job: Mapping[str, Any], unread: Collection[str] = ()
) -> tuple[str, str]:
    """Return the name of the runtime profile, and a note on the choice, which is empty if there is nothing to say.

    `unread` are the degrees and keys of the job that could not be read; the profile then offers what they may be.
    """
    if flags.has(*DEEPSPEED):
        return _on_deepspeed(degrees, job, unread)
    is_fsdp = job.get("zero_stage", 0) > 1
    if flags.has(*MINDSPEED):
        why = f"the profile mindspeed has no ZeRO {job.get('zero_stage')}: the runtime is unknown"
        return (UNKNOWN, why) if is_fsdp else ("mindspeed", "")
    if not flags.has(*_OLD):
        return "megatron-core", _FITTED_WITHOUT_FSDP if is_fsdp else ""
    # the profiles of old versions, which had no context and expert parallelism
    is_mixed = job.get("zero_stage", 0) or any(degrees.get(name, 1) > 1 for name in ("cp", "up", "ep"))
    if is_mixed or "zero_stage" in unread:
        return UNKNOWN, "flags of old and of new versions of Megatron-LM stand side by side: the runtime is unknown"
    is_of_2022 = job.get("sequence_parallel") or job.get("recompute") == "selective"
    is_of_2022 = is_of_2022 or not {"sequence_parallel", "recompute"}.isdisjoint(unread)
    return "megatron-lm-2022" if is_of_2022 else "megatron-lm-2021", ""


def _on_deepspeed(degrees: Mapping[str, int], job: Mapping[str, Any], unread: Collection[str]) -> tuple[str, str]:
    """Choose among the profiles of Megatron's layers on DeepSpeed.

    The profile megatron-deepspeed is fitted to runs without Ulysses, experts, sequence parallelism and ZeRO 2 or 3, and
    its rules exclude them. gpt-neox has the same layers and constants, experts and all stages of ZeRO.
    """
    beyond = [f"{name} = {degrees[name]}" for name in ("cp", "up", "vpp") if degrees.get(name, 1) > 1]
    beyond += ["sequence parallelism"] if job.get("sequence_parallel") else []
    beyond += [f"expert_tp = {job['expert_tp']}"] if job.get("expert_tp") else []
    if beyond:
        return UNKNOWN, f"the profile megatron-deepspeed has no {', '.join(beyond)}: the runtime is unknown"
    further = ["ep"] if degrees.get("ep", 1) > 1 or "ep" in unread else []
    further += [f"ZeRO {job['zero_stage']}"] if job.get("zero_stage", 0) > 1 else []
    if not further:
        return "megatron-deepspeed", ""
    return "gpt-neox", (
        f"the profile megatron-deepspeed has no {', '.join(further)}; gpt-neox has the same layers on DeepSpeed"
    )
