"""Training program of a user: a small MLP with torch and gloo, in pipelines of stages and replicas of them.

Its number of layers is a flag, as the batch is. It prints the lines of Megatron-LM, and first the sizes that it got.

    torchrun --nproc-per-node=4 layered_training.py --layers 8 --pp 2 --mbs 2 --batch 16 --steps 7
"""

import argparse
import json
import sys
import time

import torch
import torch.distributed as dist

HIDDEN = 256
TOKENS = 64


def main() -> None:
    """Train, and print a line for each step."""
    parser = argparse.ArgumentParser()
    for name in ("layers", "pp", "mbs", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # stages are outermost, as in Megatron-LM's order of ranks
    dp = world // given.pp
    stage, replica = divmod(rank, dp)
    replicas = [dist.new_group(range(first, first + dp)) for first in range(0, world, dp)][stage]
    held = given.layers // given.pp + (stage < given.layers % given.pp)
    model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(held)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if rank == 0:
        say(json.dumps(vars(given) | {"world": world}))
    before, after = (stage - 1) * dp + replica, (stage + 1) * dp + replica
    for step in range(1, given.steps + 1):
        begun_s = time.perf_counter()
        passed = []
        for _ in range(given.batch // (dp * given.mbs)):
            entering = torch.randn(given.mbs * TOKENS, HIDDEN)
            if stage:
                dist.recv(entering, before)
                entering.requires_grad_()
            leaving = model(entering)
            if stage < given.pp - 1:
                dist.send(leaving.detach(), after)
            passed.append((entering, leaving))
        for entering, leaving in passed:
            gradient = torch.empty_like(leaving)
            if stage < given.pp - 1:
                dist.recv(gradient, after)
                leaving.backward(gradient)
            else:
                leaving.square().mean().backward()
            if stage:
                assert entering.grad is not None
                dist.send(entering.grad, before)
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if rank == 0:
            elapsed_ms = (time.perf_counter() - begun_s) * 1000
            say(f"iteration {step}/ {given.steps} | elapsed time per iteration (ms): {elapsed_ms:.3f} |")


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
