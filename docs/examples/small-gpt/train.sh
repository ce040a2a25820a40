#!/bin/bash
# Trains a small GPT on two cores of this machine, in the style of Megatron-LM's example scripts.
GPUS_PER_NODE=${GPUS_PER_NODE:-2}

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
    --master_addr localhost
    --master_port 29511
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 8
    --vocab-size 1024
    --max-position-embeddings 128
    --position-embedding-type learned_absolute
)

TRAINING_ARGS=(
    --seq-length 128
    --micro-batch-size 1
    --global-batch-size 16
    --train-iters 500
    --lr 3e-4
    --log-interval 10
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1
)

export OMP_NUM_THREADS=1

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PARALLEL_ARGS[@]}"
