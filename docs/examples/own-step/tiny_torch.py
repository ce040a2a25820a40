"""A small decoder in torch, as its author wrote it; `step` is all that Meshtune needs."""

import torch
from torch import nn
from torch.nn import functional

LAYERS, VOCABULARY, MODEL, HEADS, HIDDEN = 2, 1024, 256, 4, 1024
ROWS, LENGTH = 8, 64


class Block(nn.Module):
    """Causal attention and a perceptron; b rows, t tokens, d model, n heads, h head."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(MODEL), nn.RMSNorm(MODEL)
        self.qkv, self.out = nn.Linear(MODEL, 3 * MODEL, bias=False), nn.Linear(MODEL, MODEL, bias=False)
        self.up, self.down = nn.Linear(MODEL, HIDDEN, bias=False), nn.Linear(HIDDEN, MODEL, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, MODEL), nn.RMSNorm(MODEL)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(MODEL, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def loss_of(module, tokens, labels):
    """Return the mean loss of a batch."""
    return functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())


def optimizer_of(parameters):
    """Return the optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def step():
    """Return the module, its inputs, the loss, and what makes the optimizer."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    return Decoder(), (tokens[:, :-1], tokens[:, 1:]), loss_of, optimizer_of
