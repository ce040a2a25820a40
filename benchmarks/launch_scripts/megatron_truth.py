"""Facts of a command that takes Megatron-LM's flags.

Sources: Megatron-LM megatron/training/arguments.py (names, defaults, `validate_args`), deepspeedai/Megatron-DeepSpeed
megatron/arguments.py, MindSpeed-LLM mindspeed_llm/training/arguments.py, DeepSpeed runtime/config.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.launch_scripts.truth import NOTHING, Truth, contradiction
from benchmarks.launch_scripts.words import Command, command_of, world_of
from tuner.capture.record import Record

_NO_TRAINING = re.compile(
    r"preprocess|convert|generat|inference|infer_|eval|server|quantize|export|merge|download|bench(mark)?_|prune|"
    r"validate|extract|tokenize|load_|_converter|hf2|2hf|create_|mmlu|prompt"
)
_OTHER = {
    "T5": r"(^|_|/)t5",
    "BERT": r"(^|_|/)(bert|ict|realm|biencoder)",
    "vision": r"vision|vit_|_vit|image|flux|_vl(_|\.)|vlm|multimodal|llava|mimo|clip|avlm",
    "RETRO": r"retro",
    "state-space layers": r"mamba|hybrid|rwkv",
    "preferences": r"dpo|ppo|grpo|rlhf|rl_",
}
_OTHER_FLAGS = {
    "adapters": r"--(lora-(?!fusion).*|use-lora|qlora|.*-lora-dim|lora-dim)",
    "state-space layers": r"--(mamba-.*|is-hybrid-model|hybrid-.*-(pattern|ratio)|hybrid-layer-pattern)",
    "RETRO": r"--retro-(add-retriever|project-dir)",
    "vision": r"--(img-h|img-w|vision-model-type|vision-ckpt|language-model-type)",
}
SIGNS = ("--num-layers", "--hidden-size", "--tensor-model-parallel-size", "--micro-batch-size", "--batch-size")


def megatron_truth(record: Record, script: str) -> Truth | None:
    """Return the truth of a recorded command, or None if it takes no flags of Megatron-LM."""
    command = command_of(record.words)
    if _NO_TRAINING.search(command.program.rpartition("/")[2].lower()):
        return NOTHING
    if sum(command.has(sign) for sign in SIGNS) < 2 and not command.has("--hybrid-layer-pattern"):
        return None
    return truth_of(command, world_of(record, command, script), deepspeed_file(record, command))


def other_kind(command: Command) -> str:
    """Return the kind of training that is none of a whole decoder-only transformer, or nothing."""
    # the last two folders, such as examples/mimo/train.py
    program = "/".join(command.program.lower().split("/")[-2:])
    for kind, pattern in _OTHER.items():
        if re.search(pattern, program):
            return kind
    for kind, pattern in _OTHER_FLAGS.items():
        if any(re.fullmatch(pattern, name) for name in command.flags):
            return kind
    if command.has("--task"):
        return "downstream task"
    if command.text("--stage") not in ("", "sft", "pt"):
        return "preferences"
    return ""


def truth_of(command: Command, world: int | None, deepspeed: dict[str, Any]) -> Truth:
    """Return the truth of a command's flags."""
    if other := other_kind(command):
        return Truth(framework="megatron", other=other)
    facts = _degrees(command) | _sizes(command) | _job(command, deepspeed)
    tp, pp, cp = facts.get("tp"), facts.get("pp"), facts.get("cp")
    if world and tp and pp and cp and world % (tp * pp * cp) == 0:
        facts["dp"] = world // (tp * pp * cp)
    facts["world"] = world
    gbs = command.number("--global-batch-size")
    if gbs is None and command.has("--gas") and facts.get("dp"):
        gbs = (command.number("--gas") or 1) * facts["mbs"] * facts["dp"]
    if gbs is None and not command.has("--global-batch-size", "--gas") and facts.get("dp") and facts.get("mbs"):
        gbs = facts["mbs"] * facts["dp"] * _rounds(deepspeed)
    facts["gbs"] = gbs
    known = {name: value for name, value in facts.items() if value is not None}
    return Truth(framework="megatron", facts=known, padded=_padded(command, tp), impossible=contradiction(known))


def _rounds(deepspeed: dict[str, Any]) -> int:
    rounds = deepspeed.get("gradient_accumulation_steps", 1)
    return rounds if isinstance(rounds, int) else 1


def _degrees(command: Command) -> dict[str, Any]:
    def degree(*names: str) -> int | None:
        return command.number(*names) if command.has(*names) else 1

    tp = degree("--tensor-model-parallel-size", "--model-parallel-size")
    pp = degree("--pipeline-model-parallel-size", "--pipe-parallel-size")
    facts: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": degree("--context-parallel-size", "--ds-sequence-parallel-size"),
        "mbs": command.number("--micro-batch-size", "--batch-size"),
        "ep": 1,
        "vpp": 1,
    }
    if _experts(command):
        facts["ep"] = degree("--expert-model-parallel-size", "--moe-expert-parallel-size")
        if command.has("--moe-tp-extend-ep") and facts["ep"] and tp:
            facts["ep"] *= tp
    layers = command.number("--num-layers")
    per_chunk = command.number("--num-layers-per-virtual-pipeline-stage")
    if command.has("--pipeline-model-parallel-layout"):
        facts["vpp"] = None
    elif per_chunk and layers and pp and pp > 1:
        facts["vpp"] = layers // pp // per_chunk
    elif command.has("--num-virtual-stages-per-pipeline-rank"):
        facts["vpp"] = command.number("--num-virtual-stages-per-pipeline-rank")
    return facts


def _experts(command: Command) -> int:
    experts = command.number("--num-experts") or 0
    return experts if experts > 1 else 0


def _sizes(command: Command) -> dict[str, Any]:
    layers, hidden = command.number("--num-layers"), command.number("--hidden-size")
    heads = command.number("--num-attention-heads")
    if layers and command.has("--noop-layers"):
        layers -= len(set(command.text("--noop-layers").split(",")))
    facts: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads}
    if command.has("--group-query-attention"):
        facts["kv_heads"] = command.number("--num-query-groups") if command.has("--num-query-groups") else 1
    elif command.has("--num-key-value-heads"):
        facts["kv_heads"] = command.number("--num-key-value-heads")
    if command.has("--multi-latent-attention", "--multi-head-latent-attention"):
        facts["kv_heads"] = heads
    ffn = command.number("--ffn-hidden-size", "--intermediate-size")
    if ffn is None and hidden and not command.has("--multiple-of"):
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if command.has("--swiglu") else 4 * hidden
    facts["ffn"] = ffn
    experts = _experts(command)
    facts["experts"] = experts or 1
    if experts:
        default = 1 if command.has("--moe-expert-parallel-size") else 2
        facts["top_k"] = command.number("--moe-router-topk", "--moe-topk", "--topk") or default
    return facts


def _padded(command: Command, tp: int | None) -> tuple[int, ...]:
    stated = command.number("--padded-vocab-size", "--pad-vocab-size-to")
    if stated:
        return (stated,)
    size = command.number("--vocab-size")
    if size and command.text("--tokenizer-type") == "NullTokenizer":
        size += 1  # for the end of a document
    if size is None and command.text("--vocab-file").endswith("gpt2-vocab.json"):
        is_extended = command.has("--extra-vocab-size", "--patch-tokenizer-type")
        size = 50257 if not is_extended and "GPT2BPE" in (command.text("--tokenizer-type") or "GPT2BPE") else None
    multiple = command.number("--make-vocab-size-divisible-by") or 128
    multiples = (multiple, multiple * (tp or 1))
    return tuple(-(-size // one) * one for one in multiples) if size else ()


def _job(command: Command, deepspeed: dict[str, Any]) -> dict[str, Any]:
    tp = command.number("--tensor-model-parallel-size", "--model-parallel-size") or 1
    facts: dict[str, Any] = {
        "sequence": command.number("--seq-length", "--encoder-seq-length"),
        "precision": _precision(command, deepspeed),
        "recompute": _recompute(command),
        "zero_stage": _stage(command, deepspeed),
        "offload": "optimizer" if command.has("--optimizer-cpu-offload") else "none",
    }
    if command.has("--decoder-seq-length"):
        facts["sequence"] = command.number("--decoder-seq-length")
    if tp > 1:
        facts["sequence_parallel"] = command.has("--sequence-parallel")
    optimizer = deepspeed.get("zero_optimization", {})
    device = optimizer.get("offload_optimizer", {}).get("device", "none")
    if device == "cpu" or optimizer.get("cpu_offload") is True:
        facts["offload"] = "optimizer"
    if command.has("--cpu-optimizer", "--swap-optimizer"):
        facts["offload"] = None  # the states are on the host in part, which a study says in a note
    return facts


def _precision(command: Command, deepspeed: dict[str, Any]) -> str:
    if command.has("--fp4-format"):
        return "nvfp4"
    if command.has("--fp8-format", "--fp8-hybrid", "--fp8-e4m3"):
        return "fp8"
    for section, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if deepspeed.get(section, {}).get("enabled") is True:
            return name
    return "bf16" if command.has("--bf16") else "fp16" if command.has("--fp16") else "fp32"


def _recompute(command: Command) -> str | None:
    if command.has("--recompute-activations"):
        return "selective"
    if command.has("--checkpoint-activations", "--activations-checkpoint-method"):
        return "full"
    stated = command.text("--recompute-granularity", "--activations-checkpoint-granularity", "--checkpoint-granularity")
    return stated or ("selective" if command.has("--moe-layer-recompute") else "none")


def _stage(command: Command, deepspeed: dict[str, Any]) -> int | None:
    if command.has("--deepspeed", "--deepspeed-config"):
        stated = deepspeed.get("zero_optimization", {}).get("stage")
        return stated if isinstance(stated, int) else command.number("--zero-stage")
    if command.has("--use-megatron-fsdp", "--use-custom-fsdp"):
        named = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        return named.get(command.text("--data-parallel-sharding-strategy"), 0)
    if command.has("--use-torch-fsdp2"):
        return 2 if command.has("--torch-fsdp2-no-reshard-after-forward") else 3
    if command.has("--enable-zero3"):
        return 3
    return 1 if command.has("--use-distributed-optimizer") else 0


def deepspeed_file(record: Record, command: Command) -> dict[str, Any]:
    """Return DeepSpeed's configuration that a command names, empty if it is not there."""
    text = record.files.get(command.text("--deepspeed-config"), "") or record.files.get(command.text("--deepspeed"), "")
    try:
        loaded = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return loaded if isinstance(loaded, dict) else {}
