"""Scripts of programs with settings over a recipe, each written after a public one that is named above it."""

from __future__ import annotations

# NVIDIA-NeMo/Megatron-Bridge examples/training_features/long_context/qwen3_600m_sft_128k.sh and
# examples/models/nemotron/nemotron_3/nano/slurm_pretrain.sh (forms of command and overrides)
BRIDGE = """\
#!/bin/bash
WORKSPACE=${WORKSPACE:-/workspace}
TP=2
torchrun --nproc_per_node=8 --nnodes=2 scripts/training/run_recipe.py \\
    --recipe llama3_8b_pretrain_config \\
    -mb 1 \\
    train.global_batch_size=128 \\
    train.train_iters=50 \\
    model.seq_length=8192 dataset.seq_length=8192 \\
    model.tensor_model_parallel_size=$TP \\
    model.pipeline_model_parallel_size=2 \\
    model.virtual_pipeline_model_parallel_size=null \\
    model.context_parallel_size=1 \\
    model.sequence_parallel=True \\
    model.apply_rope_fusion=True \\
    checkpoint.save=${WORKSPACE}/results \\
    logger.wandb_project=mine logger.log_interval=10
"""

# what `cfg.to_yaml` writes, cut to some fields of each section
BRIDGE_YAML = """\
_target_: megatron.bridge.training.config.ConfigContainer
ddp: {_target_: megatron.core.distributed.DistributedDataParallelConfig, use_distributed_optimizer: true}
dataset: {_target_: megatron.bridge.training.config.GPTDatasetConfig, sequence_length: 8192}
mixed_precision: bf16_mixed
model:
  _target_: megatron.bridge.models.llama.Llama3ModelProvider
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 128
  vocab_size: 128256
  gated_linear_unit: true
  add_bias_linear: false
  normalization: RMSNorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  seq_length: 8192
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: null
  context_parallel_size: 2
  expert_model_parallel_size: 1
  sequence_parallel: false
  recompute_granularity: null
optimizer: {optimizer: adam, use_distributed_optimizer: true}
peft: null
train: {global_batch_size: 512, micro_batch_size: 1}
"""

# modelscope/ms-swift examples/megatron/multi-node/node1.sh and examples/megatron/base_to_chat.sh
SWIFT = """\
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 NPROC_PER_NODE=8 \\
megatron sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'a/b#20000' 'c/d' \\
    --tensor_model_parallel_size 4 --sequence_parallel true \\
    --micro_batch_size 2 --global_batch_size 32 \\
    --packing true --max_length 8192 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --attention_backend flash --lr 1e-5 \\
    --output_dir megatron_output --save_steps 200
"""

# modelscope/ms-swift examples/yaml/megatron/sft.yaml
SWIFT_YAML = """\
ENV: {NPROC_PER_NODE: '4'}
model: Qwen/Qwen2.5-7B
dataset: ['a/b#500']
max_length: 2048
packing: true
micro_batch_size: 1
global_batch_size: 4
sequence_parallel: true
recompute_granularity: none
"""

# AI-Hypercomputer/maxtext src/maxtext/configs/gpu/a3/llama_2_7b/16vm.sh and configs/gpu/models/llama2_7b.yml
MAXTEXT = """\
#!/bin/bash
export EXECUTABLE=train
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true"
python3 -m maxtext.trainers.pre_train.train configs/llama2_7b.yml run_name=run \\
    dcn_data_parallelism=16 ici_fsdp_parallelism=2 ici_tensor_parallelism=4 base_output_directory=/out profiler=xplane
"""
MAXTEXT_YAML = """\
base_config: base.yml
hardware: gpu
per_device_batch_size: 4
max_target_length: 4096
model_name: llama2-7b
remat_policy: minimal_with_context
"""

# volcengine/verl examples/grpo_trainer/run_qwen2-7b_math_megatron.sh
VERL = """\
set -x
export CUDA_DEVICE_MAX_CONNECTIONS=1
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=5 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=selective \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.logger='["console","wandb"]'
"""

# NVIDIA/NeMo docs/source/features/parallelisms.rst
NEMO = """\
nemo llm pretrain --factory llama3_8b trainer.num_nodes=2 trainer.devices=8 \\
    trainer.strategy.tensor_model_parallel_size=2 trainer.strategy.pipeline_model_parallel_size=1 \\
    data.micro_batch_size=1 data.global_batch_size=16 log.ckpt=null
"""

# NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/recipes/llama/h100/llama3.py (form of a recipe)
BRIDGE_PYTHON = '''\
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common


def llama3_70b_pretrain_config():
    """Return a configuration."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").get_model_config()
    cfg.dataset.seq_length = 8192
    cfg.model.seq_length = 8192
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    return cfg


def llama3_70b_pretrain_fp8_config():
    """Return the same in fp8, with a part recomputed."""
    cfg = llama3_70b_pretrain_config()
    cfg.mixed_precision = "bf16_with_fp8_current_scaling_mixed"
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["core_attn"]
    if some_flag():
        cfg.model.context_parallel_size = 4
    _tune(cfg)
    return cfg


def _tune(config):
    config.train.micro_batch_size = 2 * config.model.tensor_model_parallel_size
'''

# pytorch/torchtitan run_train.sh, and torchtitan/models/llama3/config_registry.py (forms of 0.3.0 and of main)
TITAN = """\
torchrun --nproc_per_node=8 --nnodes=4 -m torchtitan.train --module llama3 --config llama3_8b_tuned \\
    --parallelism.tensor_parallel_degree 2
"""
TITAN_PYTHON = """\
from torchtitan.trainer import Trainer

from . import model_registry


def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, context_parallel_degree=2),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_8b_tuned() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B")
    config.activation_checkpoint = FullAC.Config()
    config.training.local_batch_size = 2
    return config


def llama3_8b_main() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(),
    )
"""
