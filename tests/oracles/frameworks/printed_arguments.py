"""Arguments as Megatron-LM resolves and prints them, for flags of a launch script.

Source: Megatron-LM megatron/training/arguments.py: the parser's names, defaults and switches, `validate_args` for the
derived values, and `_print_args`. Only arguments that shape a step are kept, and some that must not matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

_NUMBERS = {
    "num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "kv-channels": None,
    "num-query-groups": 1,
    "seq-length": None,
    "max-position-embeddings": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "num-experts": None,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "mtp-num-layers": None,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "num-distributed-optimizer-instances": 1,
    "recompute-num-layers": None,
    "cpu-offloading-num-layers": 0,
    "log-interval": 100,
}
_TEXTS = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "optimizer": "adam",
    "recompute-granularity": None,
    "recompute-method": None,
    "data-parallel-sharding-strategy": "no_shard",
    "moe-token-dispatcher-type": "allgather",
    "tokenizer-type": None,
}
_LISTS: dict[str, list[str] | None] = {
    "recompute-modules": None,
    "cp-comm-type": ["p2p"],
    "hierarchical-context-parallel-sizes": None,
    "rampup-batch-size": None,
    "data-path": None,
}
_SWITCHES = (
    *("bf16", "fp16", "swiglu", "sequence-parallel", "use-distributed-optimizer", "group-query-attention"),
    *("untie-embeddings-and-output-weights", "add-qkv-bias", "qk-layernorm", "use-rotary-position-embeddings"),
    *("multi-latent-attention", "use-megatron-fsdp", "use-torch-fsdp2", "recompute-activations", "overlap-grad-reduce"),
    *("overlap-param-gather", "moe-router-enable-expert-bias", "cpu-offloading", "optimizer-cpu-offload"),
    "moe-grouped-gemm",
)


def resolve_arguments(flags: Sequence[str], world_size: int) -> dict[str, Any]:
    """Return the arguments by name, after Megatron-LM has derived the missing ones."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, number in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, text in _TEXTS.items():
        parser.add_argument(f"--{name}", default=text)
    for name, items in _LISTS.items():
        numbers = "sizes" in name
        parser.add_argument(f"--{name}", nargs="+", default=items, type=int if numbers else str)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    parser.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    parser.add_argument("--fp8-format", dest="fp8", default=None)
    parser.add_argument("--moe-layer-freq", type=eval, default=1)  # as Megatron-LM does
    parser.add_argument("--pipeline-model-parallel-layout", default=None)
    args = parser.parse_args(list(flags))
    _validate(args, world_size)
    return vars(args)


def _validate(args: argparse.Namespace, world_size: int) -> None:
    args.rank, args.world_size = 0, world_size
    pp = args.pipeline_model_parallel_size
    copy = args.tensor_model_parallel_size * pp * args.context_parallel_size
    args.data_parallel_size = world_size // copy
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    del args.recompute_activations
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    chunks = args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_model_parallel_layout is not None:
        chunks = None
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        chunks = args.num_layers // pp // args.num_layers_per_virtual_pipeline_stage
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.ffn_hidden_size is None:
        swiglu = int((4 * args.hidden_size * 2 / 3) / 64) * 64
        args.ffn_hidden_size = swiglu if args.swiglu else 4 * args.hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    args.params_dtype = "torch.bfloat16" if args.bf16 else "torch.float16" if args.fp16 else "torch.float32"


def print_arguments(args: dict[str, Any]) -> str:
    """Return the printed block of arguments."""
    lines = sorted((f"  {name} {'.' * (48 - len(name))} {value}" for name, value in args.items()), key=str.lower)
    head, end = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join([head, *lines, end, ""])
