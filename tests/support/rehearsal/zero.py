"""Training program of DeepSpeed: a small model under a stage of ZeRO, which accumulates gradients over two batches."""

import argparse
import sys

import deepspeed
import torch
from torch import nn

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--type", choices=("bf16", "fp16"), default="bf16")
    arguments = parser.parse_args()
    hidden = arguments.hidden
    config = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage, "reduce_bucket_size": 4 * hidden * hidden},
        arguments.type: {"enabled": True},
    }
    model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(8)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = torch.bfloat16 if arguments.type == "bf16" else torch.float16
    for step in range(8):
        batch = torch.randn(arguments.micro_batch_size, hidden, dtype=dtype, device=engine.device)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        sys.stdout.write(f"batch {step}: loss {loss.item():.3f}, norm {engine.get_global_grad_norm()}\n")
