"""Training program of plain PyTorch: a small model under DDP or FSDP, which asks for its rank and its loss."""

import argparse
import copy
import os
import sys
from pathlib import Path
from urllib.request import urlopen

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def wrapped(model, arguments, device):
    """Return the model as all ranks share it."""
    if arguments.wrapper == "fsdp1":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=device, sync_module_states=True
        )
    if arguments.wrapper == "fsdp":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model, device_ids=[device.index])


def batches(arguments):
    """Yield batches: from a loader, or made in place."""
    rows = 64 * arguments.micro_batch_size
    if arguments.data:
        data = TensorDataset(torch.randn(rows, arguments.hidden))
        sampler = DistributedSampler(data)
        loader = DataLoader(data, arguments.micro_batch_size, sampler=sampler, num_workers=2, pin_memory=True)
        yield from (batch for (batch,) in loader)
    while True:
        yield torch.randn(arguments.micro_batch_size, arguments.hidden)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--wrapper", choices=("ddp", "fsdp", "fsdp1"), default="ddp")
    parser.add_argument("--read")
    for flag in ("--data", "--half", "--recompute", "--compile", "--average"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()
    if arguments.read:
        is_of_network = arguments.read.startswith("http")
        data = urlopen(arguments.read).read() if is_of_network else Path(arguments.read).read_bytes()  # noqa: S310
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    hidden = arguments.hidden
    layers = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(4))).to(device)
    average = copy.deepcopy(layers) if arguments.average else None
    model = wrapped(layers, arguments, device)
    if arguments.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=arguments.half)
    for step, batch in zip(range(3), batches(arguments), strict=False):
        with torch.autocast("cuda", dtype=torch.float16, enabled=arguments.half):
            x = batch.to(device, non_blocking=True)
            y = checkpoint_sequential(layers, 2, x, use_reentrant=False) if arguments.recompute else model(x)
            loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: loss {loss.item():.3f}\n")
