"""Program that trains a transformer block on the CPU and profiles a step of its warm-up as frameworks do.

Arguments: folder of the trace, number of steps, and `--packed` for a compressed trace.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.checkpoint import checkpoint

SEQUENCES, POSITIONS, HIDDEN, HEADS = 2, 128, 128, 8
PROFILED = 3


class Block(nn.Module):
    """Attention and an MLP with recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden):
        """Run one forward pass."""
        parts = self.qkv(self.norm(hidden)).view(SEQUENCES, POSITIONS, 3, HEADS, HIDDEN // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + context.transpose(1, 2).reshape(SEQUENCES, POSITIONS, HIDDEN)
        return checkpoint(lambda x: self.down(functional.gelu(self.up(x))), hidden, use_reentrant=False)


def main() -> None:
    """Train, and print one line per step."""
    folder, num_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(SEQUENCES, POSITIONS, HIDDEN)
    profiler = profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=PROFILED - 2, warmup=1, active=1, repeat=1),
        on_trace_ready=tensorboard_trace_handler(folder, use_gzip="--packed" in sys.argv),
    )
    with profiler:
        for iteration in range(1, num_steps + 1):
            begin_s = time.perf_counter()
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
            took_ms = 1e3 * (time.perf_counter() - begin_s)
            sys.stdout.write(f"iteration {iteration}/ 100 | elapsed time per iteration (ms): {took_ms:.3f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
