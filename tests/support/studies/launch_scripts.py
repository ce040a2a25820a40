"""Launch scripts in common forms, and other files that `meshtune init` reads."""

from __future__ import annotations

ARRAYS = """\
#!/bin/bash
# pretrains an 8B model
export NCCL_DEBUG=WARN
export WANDB_API_KEY=not-for-a-study
GPUS=8
NODES=${SLURM_NNODES:-"4"}

TP=${TP:-4}
PP=2

LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NODES
    --master_addr ${MASTER_ADDR:-localhost}
)

MODEL=(
    --num-layers 32
    --hidden-size 4096          # of the 8B
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --vocab-size 128256
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)

BATCH=(
    --seq-length $((4096 * 2))
    --micro-batch-size 1
    --global-batch-size 256
    # --recompute-granularity full
)

LAYOUT=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size ${PP}
    --num-layers-per-virtual-pipeline-stage 4
    --context-parallel-size 2
    --use-distributed-optimizer
    --overlap-grad-reduce
    --sequence-parallel
)

OTHER=(
    --bf16
    --mock-data
    --tokenizer-type HuggingFaceTokenizer
    --lr 3e-4
    --train-iters 1000
    --save /checkpoints/8b
    --save-interval 500
    --log-interval 100
    --tensorboard-dir /checkpoints/8b/tensorboard
    --wandb-project pretraining
    --wandb-exp-name 8b
)

torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" "${BATCH[@]}" "${LAYOUT[@]}" "${OTHER[@]}"
"""

STRINGS = """\
#!/bin/bash
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
TP=8

OPTIONS=" \\
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size 4 \\
    --sequence-parallel \\
    --num-layers 48 --hidden-size 8192 --num-attention-heads 64 \\
    --seq-length 4096 --max-position-embeddings 4096 \\
    --micro-batch-size 2 --global-batch-size 1024 \\
    --padded-vocab-size 65536 \\
    --recompute-activations \\
    --fp16 \\
    --data-path $1
"
srun -l bash -c "python -u pretrain_gpt.py ${OPTIONS}"
"""

ASCEND = """\
source /usr/local/Ascend/ascend-toolkit/set_env.sh
NPUS_PER_NODE=8
NNODES=4
TP=8
MOE="
    --num-experts 64 \\
    --moe-router-topk 6 \\
    --moe-ffn-hidden-size 1408 \\
    --n-shared-experts 2 \\
    --first-k-dense-replace 1 \\
    --expert-model-parallel-size 8
"
GPT="
    --num-layers 28 --noop-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 \\
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --position-embedding-type rope --disable-bias-linear \\
    --untie-embeddings-and-output-weights --padded-vocab-size 102400 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel \\
    --context-parallel-size 4 --context-parallel-algo ulysses_cp_algo \\
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --use-distributed-optimizer --bf16
"
torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py $GPT $MOE | tee log
"""

TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "full"
"""

TORCHTITAN_FLAGS = """\
NGPU=8
torchrun --nproc_per_node=${NGPU} -m torchtitan.train --module llama3 --config llama3_8b \\
    --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 \\
    --training.seq_len 4096 --training.local_batch_size 4 --training.global_batch_size 64
"""

TORCHTITAN_SCRIPT = """\
CONFIG=${CONFIG:-llama3_8b}
PYTORCH_ALLOC_CONF="expandable_segments:True" torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend c10d --tee 3 \\
    -m torchtitan.train --module llama3 --config ${CONFIG} --training.steps 200 --compile.enable \\
    --parallelism.tensor-parallel-degree=4 --parallelism.no-enable-sequence-parallel \\
    --training.seq_len 4096 --training.local_batch_size 2 --training.global_batch_size 64 \\
    --checkpoint.enable --checkpoint.interval 100 --metrics.log_freq 10 \\
    --metrics.enable_wandb activation-checkpoint:full
"""

NANOTRON = """\
parallelism: {dp: 4, pp: 2, tp: 2, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 2048}
optimizer: {zero_stage: 1, optimizer_factory: {name: adamW}}
model:
  dtype: bfloat16
  model_config:
    {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192, num_attention_heads: 32,
     num_hidden_layers: 16, num_key_value_heads: 8, vocab_size: 128256, tie_word_embeddings: true}
"""

GPT_NEOX = """\
{
  # layout
  "pipe-parallel-size": 4,
  "model-parallel-size": 2,

  "num-layers": 44,
  "hidden-size": 6144,
  "num-attention-heads": 64,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "pos-emb": "rotary",
  "no-weight-tying": true,
  "vocab-file": "./20B_checkpoints/20B_tokenizer.json",

  "zero_optimization": {"stage": 1, "overlap_comm": True,},
  "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4}},
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 32,
  "checkpoint-activations": true,
  "fp16": {"enabled": true},
  "num_nodes": 12,
  "num_gpus": 8,
}
"""

FLAGSCALE_EXPERIMENT = """\
defaults:
  - _self_
  - train: 8x7b

experiment:
  exp_name: mixtral
  seed: 42
  task:
    type: train
    backend: megatron
  runner:
    nnodes: 4
    nproc_per_node: 8
    hostfile: hosts
"""

FLAGSCALE_TRAIN = """\
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  expert_model_parallel_size: 4
  sequence_parallel: true
  use_distributed_optimizer: true
  finetune: false
  precision:
    bf16: true
  recompute:
    recompute_granularity: full
    recompute_method: uniform
    recompute_num_layers: 1
model:
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  seq_length: 4096
  swiglu: true
  normalization: RMSNorm
  group_query_attention: true
  num_query_groups: 8
  disable_bias_linear: true
  position_embedding_type: rope
  untie_embeddings_and_output_weights: true
  num_experts: 8
  moe_router_topk: 2
  moe_layer_freq: "[1]*32"
  seed: ${experiment.seed}
  micro_batch_size: 1
  global_batch_size: 2048
data:
  data_path: ${data_path:??}
  tokenizer:
    vocab_size: 32000
    make_vocab_size_divisible_by: 64
"""

DEEPSPEED = """\
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "AdamW"}}
"""

CONFIG_JSON = (
    '{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000, '
    '"intermediate_size": 11008, "num_attention_heads": 32}'
)
