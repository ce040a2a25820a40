"""Keys of a study's `job:` from Megatron-LM's flags: sizes, precision, recomputation, ZeRO and offloading.

Sources: Megatron-LM megatron/training/arguments.py, megatron-core 0.16.1 distributed_data_parallel_config.py (sharding
strategies); deepspeedai/Megatron-DeepSpeed megatron/arguments.py (--zero-stage, --moe-expert-parallel-size).
"""

from __future__ import annotations

import re
from itertools import chain, takewhile
from typing import Any

from costmodels.job.training_job import RECOMPUTE_MODULES
from tuner.imports.flags import Flags
from tuner.imports.megatron_hidden import Found
from tuner.imports.megatron_model import has_experts
from tuner.imports.optimizer_names import read_optimizer

_OF_RECOMPUTE = (
    "--recompute-granularity",
    "--checkpoint-granularity",
    "--recompute-activations",
    "--checkpoint-activations",
    "--activations-checkpoint-method",
    "--moe-layer-recompute",
)
"""Flags that turn recomputation on."""
_OF_ZERO = (
    *("--zero-stage", "--deepspeed", "--enable-zero3"),
    *("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2", "--use-distributed-optimizer"),
    "--overlapped-distributed-optimizer",
)
"""Flags that shard training states."""
_SHARDING = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
"""ZeRO stage of each sharding strategy of Megatron-FSDP."""


def job_of(found: Found, beside: str) -> dict[str, Any]:
    """Return the keys of a study's `job:` that could be read.

    The sequence of a multimodal program is that of its decoder; --seq-length is then that of the images.
    """
    flags = found.flags
    lengths = ("--decoder-seq-length", "--seq-length", "--encoder-seq-length")
    job: dict[str, Any] = {
        "sequence_length": found.number("sequence_length", *lengths),
        "global_batch_size": found.number("global_batch_size", "--global-batch-size"),
        "precision": _precision(found, beside),
        "optimizer": _optimizer(found),
        **_recompute(found),
        "zero_stage": _zero_stage(found, beside),
    }
    if flags.has("--reuse-fp32-param"):
        job["shared_master_weights"] = True
    is_parallel = flags.has("--sequence-parallel")
    if found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1) != 1:
        job["sequence_parallel"] = is_parallel or found.absent("sequence_parallel", False, "--sequence-parallel")
    if has_experts(flags):
        tp = found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1)
        expert_tp = flags.count("--expert-tensor-parallel-size") or tp
        if flags.has("--moe-tp-extend-ep") or _has_whole_experts(flags):
            expert_tp = 1
        job["expert_tp"] = None if expert_tp == tp else expert_tp
    return {key: value for key, value in job.items() if value is not None}


def _optimizer(found: Found) -> str | None:
    """Return the optimizer; Adam without a flag. SGD keeps no momentum with --sgd-momentum 0."""
    flags, name = found.flags, "--optimizer"
    if flags.has(name) and flags.text(name) is None:
        found.leave_open(name, "optimizer")
        return None
    momentum = flags.text("--sgd-momentum")
    is_zero = momentum is not None and re.fullmatch(r"0*\.?0*", momentum) is not None
    optimizer, why = read_optimizer("megatron", flags.text(name) or "", has_momentum=not is_zero)
    if why:
        found.open["optimizer"] = f"{flags.place(name)}: {why}"
        return None
    if optimizer in ("muon", "adaptive_muon") and flags.text("--muon-scalar-optimizer") == "lion":
        flags.leave(
            "--muon-scalar-optimizer", "Meshtune assumes that Adam updates what is no matrix, with one state more"
        )
    return optimizer


def _has_whole_experts(flags: Flags) -> bool:
    """Return whether experts are DeepSpeed's, which tp splits only with --enable-expert-tensor-parallelism."""
    return flags.has("--moe-expert-parallel-size") and not flags.has("--enable-expert-tensor-parallelism")


_ELSEWHERE = "DeepSpeed's configuration file, which is not read, decides it"


def _reads_elsewhere(found: Found, beside: str) -> bool:
    """Return whether DeepSpeed's configuration is in a file that the script does not write itself."""
    return found.flags.has("--deepspeed") and "zero_optimization" not in beside


def _precision(found: Found, beside: str) -> str | None:
    """Return the number format of matrix products; fp32 without a flag. DeepSpeed's configuration counts first."""
    flags = found.flags
    formats = {
        "nvfp4": ("--fp4-format",),
        "fp8": ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3"),
        "bf16": ("--bf16",),
        "fp16": ("--fp16",),
    }
    given = next((name for name, names in formats.items() if flags.has(*names)), "fp32")
    if _reads_elsewhere(found, beside):
        found.open["precision"] = _ELSEWHERE
        return None
    enabled = re.findall(r"\"(bf16|bfloat16|fp16)\"\s*:\s*\{[^}]*\"enabled\"\s*:\s*true", beside)
    if flags.has("--deepspeed") and len(set(enabled)) == 1:
        return "fp16" if enabled[0] == "fp16" else "bf16"
    # A hidden flag of a narrower format would replace the given one.
    narrower = takewhile(lambda name: name != given, formats)
    return found.absent("precision", given, *chain.from_iterable(formats[name] for name in narrower))


def _recompute(found: Found) -> dict[str, Any]:
    """Return the recomputation.

    Megatron-LM v2 had --checkpoint-activations and --activations-checkpoint-method, which recompute whole layers, and
    v3 --activations-checkpoint-granularity, for a time --checkpoint-granularity. DeepSpeed's flag only changes who
    recomputes.
    """
    flags = found.flags
    if flags.has("--recompute-activations"):
        # it overrides the granularity (megatron/training/arguments.py, validate_args)
        return {} if found.may_change("recompute", *_OF_RECOMPUTE) else {"recompute": "selective", **_modules(flags)}
    kinds = {"full": "full", "selective": "selective", "none": "none"}
    whole = flags.has("--checkpoint-activations", "--activations-checkpoint-method")
    old = ("--activations-checkpoint-granularity", "--checkpoint-granularity")
    name = next((name for name in old if flags.has(name)), "--recompute-granularity")
    if flags.has(name) and flags.text(name) is None:
        found.leave_open(name, "recompute")
        return {}
    if found.may_change("recompute", *_OF_RECOMPUTE):
        return {}
    if not whole and not flags.has(name) and found.absent("recompute", "none", *_OF_RECOMPUTE) is None:
        return {}
    granularity = flags.one_of(name, kinds, "full" if whole else "none", key="recompute")
    if flags.has("--deepspeed-activation-checkpointing") and granularity == "none":
        flags.leave(
            "--deepspeed-activation-checkpointing",
            "recomputes nothing without --checkpoint-activations or --recompute-granularity; read as none",
        )
    method = "--activations-checkpoint-method" if whole else "--recompute-method"
    if granularity == "full" and flags.text(method) == "block":
        number, held = _recomputed_layers(flags)
        if number is None:
            flags.doubt(method, "recomputes only some layers of a stage: how many, is not known", "recompute")
        elif held is None or number < held:
            return {"recompute": "none", "recompute_layers": number}
    if flags.has("--moe-layer-recompute") and granularity == "none":
        granularity = "selective"
    number = flags.count("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
    is_unit = granularity == "full" and flags.text(method) == "uniform" and number is not None and number > 1
    unit = {"recompute_unit": number} if is_unit else {}
    return {"recompute": granularity, **unit, **(_modules(flags) if granularity == "selective" else {})}


def _recomputed_layers(flags: Flags) -> tuple[int | None, int | None]:
    """Return how many layers of a virtual stage the method `block` recomputes, and how many it has; None if not known.

    With MindSpeed's --enable-recompute-layers-per-pp-rank the number is that of a stage, and may be no multiple of its
    chunks.
    """
    layers, pp = flags.count("--num-layers"), flags.count("--pipeline-model-parallel-size") or 1
    number = flags.count("--recompute-num-layers", "--activations-checkpoint-num-layers", minimum=0)
    if layers is None or number is None:
        return number, None
    of_stage = -(-layers // pp)
    held = min(of_stage, flags.count("--num-layers-per-virtual-pipeline-stage") or of_stage)
    if chunks := flags.count("--num-virtual-stages-per-pipeline-rank"):
        held = -(-of_stage // chunks)
    if flags.has("--enable-recompute-layers-per-pp-rank"):
        chunks = -(-of_stage // held)
        return (number // chunks if number % chunks == 0 or number >= of_stage else None), held
    return number, held


def _modules(flags: Flags) -> dict[str, list[str]]:
    """Return the modules that selective recomputation repeats, if the flags name any.

    --moe-layer-recompute adds the experts (megatron-core transformer_config.py, __post_init__).
    """
    modules = _values(flags, "--recompute-modules")
    if flags.has("--moe-layer-recompute"):
        modules = [*(modules or ["core_attn"]), "moe"]
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            flags.leave("--recompute-modules", f"{module} is not modelled; left out")
    known = [module for module in dict.fromkeys(modules) if module in RECOMPUTE_MODULES]
    return {"recompute_modules": known} if known else {}


def offload_of(found: Found, beside: str, *, is_mindspeed: bool) -> dict[str, str]:
    """Return the key of `job:` for optimizer states on the host; MindSpeed's way is not modelled.

    DeepSpeed's configuration file says it too.
    """
    flags, name = found.flags, "--optimizer-cpu-offload"
    if _reads_elsewhere(found, beside):
        found.open["offload"] = _ELSEWHERE
        return {}
    if flags.has("--deepspeed") and "offload_optimizer" in beside:
        device = re.search(r"\"offload_optimizer\"\s*:\s*\{[^}]*\"device\"\s*:\s*\"(cpu|none)\"", beside)
        if device is None:
            found.open["offload"] = "offload_optimizer in DeepSpeed's configuration cannot be read"
        return {"offload": "optimizer"} if device is not None and device[1] == "cpu" else {}
    if not flags.has(name):
        found.absent("offload", "none", name)
        return {}
    if is_mindspeed:
        flags.leave(name, "not modelled for MindSpeed: Meshtune assumes that the optimizer states stay on the device")
        return {}
    return {"offload": "optimizer"}


def _values(flags: Flags, name: str) -> list[str]:
    return [value.text for value in flags.values(name) if not value.unknown]


def _zero_stage(found: Found, beside: str) -> int | None:
    """Return the ZeRO stage: 1 is the distributed optimizer, others come from FSDP or DeepSpeed."""
    flags = found.flags
    given = next((flag for flag in _OF_ZERO if flags.has(flag)), None)
    if given is not None:
        found.state("zero_stage", given)
    is_of_fork = given == "--overlapped-distributed-optimizer"
    if is_of_fork:
        found.open["zero_stage"] = "--overlapped-distributed-optimizer of Megatron-LLaMA is ZeRO 1 or 2"
    if is_of_fork or found.may_change("zero_stage", *_OF_ZERO):
        return None
    if given == "--zero-stage":
        return found.number("zero_stage", given, minimum=0)
    if given == "--deepspeed":
        return _stage_in_file(found, beside)
    if given is None:
        return found.absent("zero_stage", 0, *_OF_ZERO)
    return _sharded_stage(flags, given)


def _sharded_stage(flags: Flags, given: str) -> int:
    """Return the ZeRO stage of the flag that shards training states in Megatron-LM or MindSpeed."""
    if given in ("--use-megatron-fsdp", "--use-custom-fsdp"):
        return int(flags.one_of("--data-parallel-sharding-strategy", _SHARDING, "0"))
    if given == "--use-torch-fsdp2":
        return 2 if flags.has("--torch-fsdp2-no-reshard-after-forward") else 3
    return 3 if given == "--enable-zero3" else 1


def _stage_in_file(found: Found, beside: str) -> int | None:
    """Return the ZeRO stage of DeepSpeed's configuration file, if the script writes that file itself."""
    stages = set(re.findall(r"\"stage\"\s*:\s*([0-3])\b", beside))
    if len(stages) == 1:
        return int(stages.pop())
    found.open["zero_stage"] = "--zero-stage is missing; the stage is in DeepSpeed's configuration file"
    return None
