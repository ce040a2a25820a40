"""Logs of trainings, as the frameworks print them."""

from __future__ import annotations

from pathlib import Path

from tests.oracles.frameworks.printed_arguments import print_arguments, resolve_arguments

LOGGED = """\
 iteration {0:8d}/     100 | consumed samples: {0:12d} | elapsed time per iteration (ms): {1:.1f} | global batch size: \
  256 | lm loss: 1.1E+01 |
"""
"""Line of a step, with its number and its milliseconds."""
_FLAGS = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seq-length 8192 --micro-batch-size 1 "
    "--global-batch-size 256 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 4 --context-parallel-size 2 --use-distributed-optimizer "
    "--sequence-parallel --bf16"
)
LOG = print_arguments(resolve_arguments(_FLAGS.split(), 32)) + "".join(
    LOGGED.format(step, 30_000 / step) for step in range(1, 6)
)
"""Log of the script ARRAYS on its 32 devices."""

PUBLIC = Path(__file__).with_name("public_logs")
"""Folder of excerpts of public logs; the first line of each says where it is from."""

_DENSE = (
    "--num-layers 32 --vocab-size 32000 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--global-batch-size 64 --bf16 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --use-distributed-optimizer --sequence-parallel"
)
_STEP = (
    " iteration {0:8d}/     100 | consumed samples: {1:12d} | elapsed time per iteration (ms): {2:.1f} | global batch "
    "size:    64 | lm loss: {3:.6E} |\n"
)


def dense_log(hidden: int, tp: int, pp: int, mbs: int, step_s: float, *, steps: int = 7, first_loss: float = 11) -> str:
    """Return the log of a LLaMA of 32 layers on eight devices; its first step is slow."""
    degrees = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --micro-batch-size {mbs}"
    flags = f"{_DENSE} --hidden-size {hidden} {degrees}"
    printed = print_arguments({**resolve_arguments(flags.split(), 8), "transformer_impl": "transformer_engine"})
    return printed + "".join(
        _STEP.format(step, 64 * step, 1e3 * step_s * (3 if step == 1 else 1), first_loss - 0.1 * step)
        for step in range(1, steps + 1)
    )


TORCHTITAN_H200 = """\
    [rank0]:2025-02-13 11:33:12,138 - root - INFO - CUDA capacity: NVIDIA H200 with 139.83GiB memory
    [rank0]:2025-02-13 11:33:12,140 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]
    [rank0]:2025-02-13 11:33:28,973 - root - INFO - Building llama3 8B with ModelArgs(dim=4096, n_layers=32, \
n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3, norm_eps=1e-05)
    [rank0]:2025-02-13 11:33:29,157 - root - INFO - Applied selective activation checkpointing to the model
    [rank0]:2025-02-13 11:33:29,482 - root - INFO - Training starts at step 1, with local batch size 1, global batch \
size 8, sequence length 8192, total steps 100 (warmup 200)
    [rank0]:2025-02-13 11:33:35,026 - root - INFO - step:  1  loss: 12.2417  memory: 42.08GiB(30.10%)  tps: 1,478
    [rank0]:2025-02-13 11:33:45,521 - root - INFO - step: 10  loss:  9.8821  memory: 49.59GiB(35.46%)  tps: 7,026
    [rank0]:2025-02-13 11:33:57,093 - root - INFO - step: 20  loss:  8.3854  memory: 49.59GiB(35.46%)  tps: 7,080
    [rank0]:2025-02-13 11:34:08,663 - root - INFO - step: 30  loss:  7.6991  memory: 49.59GiB(35.46%)  tps: 7,082
    [rank0]:2025-02-13 11:34:20,249 - root - INFO - step: 40  loss:  7.3925  memory: 49.59GiB(35.46%)  tps: 7,072
    [rank0]:2025-02-13 11:34:31,859 - root - INFO - step: 50  loss:  7.0563  memory: 49.59GiB(35.46%)  tps: 7,057
    [rank0]:2025-02-13 11:34:43,479 - root - INFO - step: 60  loss:  6.8581  memory: 49.59GiB(35.46%)  tps: 7,051
    [rank0]:2025-02-13 11:34:55,115 - root - INFO - step: 70  loss:  6.9885  memory: 49.59GiB(35.46%)  tps: 7,042
"""
"""Lines of torchtitan's with the figures of a public run of Llama 3 8B on eight H200, indented as a page shows them."""
