"""Training program of plain PyTorch: a small model under DDP or FSDP2, which asks for its rank and its loss."""

import argparse
import os
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--fsdp", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    hidden = arguments.hidden
    model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(4))).to(device)
    if arguments.fsdp:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        batch = torch.randn(arguments.micro_batch_size, hidden, device=device)
        loss = model(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: loss {loss.item():.3f}\n")
