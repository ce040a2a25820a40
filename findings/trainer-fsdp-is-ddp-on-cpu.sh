#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, PyTorch 2.13.0, Python 3.11, Linux, CPU: Trainer with `fsdp=True` trains with DDP
# where it uses CPUs, and says nothing. Every rank keeps the whole model.
#
# Whoever compares ways to shard on a machine without GPUs, or lets a test stand for a cluster, measures DDP twice. The
# arguments keep `fsdp`, so that a printed configuration shows FSDP. accelerate chooses FSDP for accelerators alone; with CPUs
# its state is MULTI_CPU, and Trainer wraps the model by that. torch's own `fully_shard` runs on CPUs over gloo.
#
# Seen:
#   asked for: fsdp=True
#   wrapped in: DistributedDataParallel, sharded parameters: 0, parameters on a rank: all
#   torch's fully_shard on the same ranks: sharded parameters: all
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "transformers==5.24.0" "accelerate==1.15.0"
cat > "$folder/train.py" <<'PROGRAM'
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments


def small_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **sizes), dtype="float32")


def sharded(module):
    return sum(isinstance(one, DTensor) for one in module.parameters())


torch.manual_seed(0)
model = small_model()
whole = sum(one.numel() for one in model.parameters())
arguments = TrainingArguments(
    "trained",
    use_cpu=True,
    fsdp=True,
    per_device_train_batch_size=4,
    max_steps=2,
    save_strategy="no",
    logging_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
examples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (16, 16))]
trainer = Trainer(model=model, args=arguments, train_dataset=examples)
trainer.train()
wrapped = trainer.model_wrapped
held = "all" if sum(one.numel() for one in wrapped.parameters()) == whole else "a part"
own = fully_shard(small_model())
if torch.distributed.get_rank() == 0:
    print(f"asked for: fsdp={arguments.fsdp}")
    print(f"wrapped in: {type(wrapped).__name__}, sharded parameters: {sharded(wrapped)}, parameters on a rank: {held}")
    count = "all" if sharded(own) == len(list(own.parameters())) else sharded(own)
    print(f"torch's fully_shard on the same ranks: sharded parameters: {count}")
torch.distributed.destroy_process_group()
PROGRAM
cd "$folder"
seen=$("$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/train.py" 2>/dev/null | grep -v train_runtime)
echo "$seen"
diff - <(echo "$seen") <<'EXPECTED'
asked for: fsdp=True
wrapped in: DistributedDataParallel, sharded parameters: 0, parameters on a rank: all
torch's fully_shard on the same ranks: sharded parameters: all
EXPECTED
