"""Log of a training with Megatron-LM."""

from __future__ import annotations

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
