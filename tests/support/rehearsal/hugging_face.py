"""Training program of Hugging Face's transformers: a model by its name or folder, in a loop of its own or a Trainer."""

import argparse
import os
import sys

import torch
from torch import distributed as dist
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", choices=("none", "auto"), default="none")
    parser.add_argument("--trainer", action="store_true")
    arguments = parser.parse_args()
    length = 128
    if arguments.trainer:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        options = TrainingArguments(
            output_dir="out",
            per_device_train_batch_size=arguments.micro_batch_size,
            max_steps=5,
            bf16=True,
            report_to=[],
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )
        tokens = TensorDataset(torch.randint(0, 1000, (64, length)))

        def collated(rows):
            """Return the tokens of some rows, which are their labels too."""
            found = torch.stack([row for (row,) in rows])
            return {"input_ids": found, "labels": found}

        Trainer(model=model, args=options, train_dataset=tokens, data_collator=collated).train()
    else:
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        named = {"tp_plan": "auto"} if arguments.plan == "auto" else {}
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, **named).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            tokens = torch.randint(0, 1000, (arguments.micro_batch_size, length), device="cuda")
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sys.stdout.write(f"step {step}: loss {loss.item():.3f}\n")
