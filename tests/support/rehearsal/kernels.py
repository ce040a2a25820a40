"""Program that prints the bytes alive after some kernels of PyTorch, as a rehearsal counts them."""

from __future__ import annotations

import json
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tuner.rehearsal.torch_room import attention, norms
from tuner.rehearsal.torch_room.cuda import DeviceFacts, stand_in_for_cuda
from tuner.rehearsal.torch_room.placement import OnCpu
from tuner.rehearsal.torch_room.watch import Watch, WatchMode

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 8, 2, 1024, 64


def heads(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return queries, keys or values."""
    return torch.empty(BATCH, number, LENGTH, SIZE, dtype=dtype, device="cuda", requires_grad=True)


def attended(number: int, dtype: torch.dtype, **named: object) -> torch.Tensor:
    """Return attention with its inputs."""
    return functional.scaled_dot_product_attention(
        heads(HEADS, dtype), heads(number, dtype), heads(number, dtype), **named
    )


def normed(weight: torch.dtype) -> torch.Tensor:
    """Return a norm of bf16 values with a weight of any type."""
    x = torch.empty(LENGTH, SIZE, dtype=torch.bfloat16, requires_grad=True)
    return functional.rms_norm(x, (SIZE,), torch.empty(SIZE, dtype=weight, requires_grad=True))


CASES = {
    "flash": lambda: attended(HEADS, torch.bfloat16, is_causal=True),
    "flash, fewer keys": lambda: attended(KV_HEADS, torch.bfloat16, is_causal=True, enable_gqa=True),
    "efficient": lambda: attended(HEADS, torch.float32, is_causal=True),
    "norm": lambda: normed(torch.bfloat16),
    "composed norm": lambda: normed(torch.float32),
}


def main() -> None:
    """Print the bytes of each case, and those of its peak with the backward pass."""
    facts = DeviceFacts(name="H100", capability=(9, 0), memory_bytes=80 << 30, num_sms=132, per_host=8)
    stand_in_for_cuda(facts)
    attention.stand_in_for_attention()
    norms.stand_in_for_norms()
    found = {}
    for name, run in CASES.items():
        watch = Watch()
        with FakeTensorMode(), OnCpu(), WatchMode(watch):
            made = run()
            kept = watch.storages.live
            made.backward(torch.empty_like(made))
        found[name] = [kept, watch.storages.peak]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
