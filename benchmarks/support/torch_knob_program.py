"""Small GPT trained by torch in one process, with settings that people tune by hand; a study's command.

    python benchmarks/support/torch_knob_program.py --mbs 2 --steps 6 --attention fused --optimizer fused --checkpoint

It prints `step N took X ms` for each optimizer step of 16 sequences of 64 tokens, in micro-batches of `--mbs`. The
number of threads is that of OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SEQUENCES, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 16, 64, 128, 4, 4, 1024


class Layer(torch.nn.Module):
    """Transformer layer.

    Args:
        attention: Whether the attention core is torch's fused one (`fused`) or spelled out (`plain`).
    """

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.attention = attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [batch, length, width]."""
        batch = x.shape[0]
        q, k, v = (
            part.view(batch, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        if self.attention == "fused":
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
            mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, LENGTH, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def main() -> None:
    """Train, and print the time of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--attention", default="plain", choices=("plain", "fused"))
    parser.add_argument("--optimizer", default="loop", choices=("loop", "foreach", "fused"))
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--set-to-zero", action="store_true", help="fill gradients with zeros in place of freeing them")
    given = parser.parse_args()
    torch.manual_seed(0)
    table = torch.nn.Embedding(VOCABULARY, WIDTH)
    layers = torch.nn.ModuleList(Layer(given.attention) for _ in range(LAYERS))
    how = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[given.optimizer]
    optimizer = torch.optim.AdamW([*table.parameters(), *layers.parameters()], lr=1e-3, **how)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1))
    for step in range(given.steps):
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=not given.set_to_zero)
        for some in tokens.split(given.mbs):
            x = table(some[:, :-1])
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if given.checkpoint else layer(x)
            logits = x @ table.weight.T
            loss = functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten())
            (loss * len(some) / SEQUENCES).backward()
        optimizer.step()
        print(f"step {step + 1} took {1000 * (time.perf_counter() - begun):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
