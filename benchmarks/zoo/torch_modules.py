"""Modules in torch whose training steps planners shard, at full size and small.

A factory takes no arguments and returns (module, inputs) or (module, inputs, loss). All tensors are on the device
`meta`, so that nothing is allocated. FACTORIES names all factories. The full sizes follow published models if the name
says so. The small modules have every operator of the large ones, in dims that two devices can halve.

Shape letters: B batch, T tokens, D model, N heads, K heads of keys, H head, F hidden, V vocabulary, E experts, C an
expert's capacity; of images also C channels, H height, W width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name of the module
from torch import Tensor, nn

Program = tuple[Any, ...]
"""Module, its inputs, and optionally a loss function of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a decoder with grouped queries, rotary positions and gated hidden layers, optionally with experts."""

    layers: int
    model: int
    heads: int
    key_heads: int
    head: int
    hidden: int
    vocabulary: int
    batch: int
    tokens: int
    experts: int = 0
    capacity: int = 0
    top_k: int = 2


class Attention(nn.Module):
    """Causal attention with rotary positions (Su et al. 2021), with the halves of a head as pairs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.query = nn.Linear(sizes.model, sizes.heads * sizes.head, bias=False)
        self.key = nn.Linear(sizes.model, sizes.key_heads * sizes.head, bias=False)
        self.value = nn.Linear(sizes.model, sizes.key_heads * sizes.head, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.head, sizes.model, bias=False)
        speeds = 10_000.0 ** (-torch.arange(0, sizes.head, 2, dtype=torch.float32) / sizes.head)
        # The angles are buffers, since an optimizer must not update them.
        angles = torch.arange(sizes.tokens, dtype=torch.float32)[:, None] * speeds
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def heads_of(self, x_btd: Tensor, layer: nn.Linear) -> Tensor:
        """Apply a linear layer and split its results into heads [B, N, T, H]."""
        # Heads move before tokens, as scaled_dot_product_attention expects them.
        batch, tokens, _ = x_btd.shape
        return layer(x_btd).view(batch, tokens, -1, self.sizes.head).transpose(1, 2)

    def rotated(self, x_bnth: Tensor) -> Tensor:
        """Rotate pairs by the angles of their positions."""
        first, second = x_bnth.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x_bnth.dtype)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Apply attention without the residual."""
        queries, keys = (self.rotated(self.heads_of(x_btd, layer)) for layer in (self.query, self.key))
        y_bnth = F.scaled_dot_product_attention(
            queries, keys, self.heads_of(x_btd, self.value), is_causal=True, enable_gqa=True
        )
        return self.out(y_bnth.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """Gated hidden layer of three linear layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.model, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.model, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the hidden layer without the residual."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Gated layers of which each token takes `top_k`; products send tokens there and back (GShard, algorithm 1)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = nn.Linear(sizes.model, sizes.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(sizes.experts, sizes.model, sizes.hidden))
        self.up = nn.Parameter(torch.empty(sizes.experts, sizes.model, sizes.hidden))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.model))

    def forward(self, x_btd: Tensor) -> Tensor:
        """Apply the experts without the residual."""
        chances_bte = self.router(x_btd).float().softmax(dim=-1)
        weights_btk, chosen_btk = chances_bte.topk(self.sizes.top_k, dim=-1)
        # The weights of the chosen experts are normalised to sum up to 1.
        weights_btk = weights_btk / weights_btk.sum(dim=-1, keepdim=True)
        # The comparison makes one-hot vectors, and works on tensors without values.
        chosen_btke = (chosen_btk[..., None] == torch.arange(self.sizes.experts, device=x_btd.device)).float()
        # A token's place in an expert is the number of earlier tokens of that expert; beyond the capacity it gets no
        # slot.
        taken_bte = chosen_btke.sum(dim=2)
        places_bte = taken_bte.cumsum(dim=1) - taken_bte
        slots_btec = (places_bte[..., None] == torch.arange(self.sizes.capacity, device=x_btd.device)).float()
        sent_btec = (slots_btec * taken_bte[..., None]).to(x_btd.dtype)
        combined_btec = torch.einsum("btk,btke->bte", weights_btk, chosen_btke)[..., None] * slots_btec
        inside_ebcd = torch.einsum("btec,btd->ebcd", sent_btec, x_btd)
        gated_ebcf = F.silu(torch.einsum("ebcd,edf->ebcf", inside_ebcd, self.gate))
        hidden_ebcf = gated_ebcf * torch.einsum("ebcd,edf->ebcf", inside_ebcd, self.up)
        done_ebcd = torch.einsum("ebcf,efd->ebcd", hidden_ebcf, self.down)
        return torch.einsum("btec,ebcd->btd", combined_btec.to(x_btd.dtype), done_ebcd)


class Layer(nn.Module):
    """Attention and a hidden layer, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.model, eps=1e-5)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.model, eps=1e-5)
        self.mlp = Experts(sizes) if sizes.experts else GatedMlp(sizes)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Apply the layer."""
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        return x_btd + self.mlp(self.mlp_norm(x_btd))


class Decoder(nn.Module):
    """Transformer from tokens to the logits of the next tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.model)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.model, eps=1e-5)
        self.head = nn.Linear(sizes.model, sizes.vocabulary, bias=False)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Return the logits [B, T, V]."""
        x_btd = self.embedding(tokens_bt)
        for layer in self.layers:
            x_btd = layer(x_btd)
        return self.head(self.norm(x_btd))


def next_token_loss(decoder: nn.Module, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
    """Compute the mean cross entropy over all tokens."""
    logits_btv = decoder(tokens_bt).float()
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def decoder_program(sizes: Sizes, *, dtype: torch.dtype = torch.bfloat16) -> Program:
    """Build one training step of a decoder."""
    with torch.device("meta"):
        tokens = torch.empty(sizes.batch, sizes.tokens, dtype=torch.int64)
        return Decoder(sizes).to(dtype), (tokens, tokens), next_token_loss


LLAMA_3_8B = Sizes(
    layers=32, model=4096, heads=32, key_heads=8, head=128, hidden=14_336, vocabulary=128_256, batch=8, tokens=4096
)
SMALL = Sizes(layers=1, model=16, heads=4, key_heads=2, head=8, hidden=20, vocabulary=24, batch=2, tokens=6)


def llama_two_layers() -> Program:
    """Build two layers of Llama 3 8B."""
    return decoder_program(replace(LLAMA_3_8B, layers=2))


def llama_18_layers() -> Program:
    """Build 18 layers of Llama 3 8B's size."""
    return decoder_program(replace(LLAMA_3_8B, layers=18))


def llama_70b() -> Program:
    """Build Llama 3 70B, whose parameters alone are 140 GB."""
    sizes = replace(LLAMA_3_8B, layers=80, model=8192, heads=64, hidden=28_672)
    return decoder_program(sizes)


def llama_small() -> Program:
    """Build one small layer."""
    return decoder_program(SMALL)


MIXTRAL_8X7B = replace(LLAMA_3_8B, vocabulary=32_000, experts=8, capacity=1024)


def mixtral_four_layers() -> Program:
    """Build four layers of Mixtral 8x7B."""
    return decoder_program(replace(MIXTRAL_8X7B, layers=4))


def mixtral_small() -> Program:
    """Build one small layer of four experts."""
    return decoder_program(replace(SMALL, experts=4, capacity=10))


class Perceptron(nn.Module):
    """Linear layers, each followed by an activation, a layer norm and a dropout."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for into, out in itertools.pairwise(widths):
            parts += [nn.Linear(into, out), nn.GELU(), nn.LayerNorm(out), nn.Dropout(0.1)]
        self.parts = nn.Sequential(*parts)

    def forward(self, x_bd: Tensor, targets_bd: Tensor) -> Tensor:
        """Compute the squared error."""
        return F.mse_loss(self.parts(x_bd), targets_bd)


def perceptron() -> Program:
    """Build eight layers of 8,192."""
    return _perceptron((8192,) * 9, batch=4096)


def perceptron_small() -> Program:
    """Build two small layers."""
    return _perceptron((6, 8, 10), batch=4)


def _perceptron(widths: tuple[int, ...], *, batch: int) -> Program:
    with torch.device("meta"):
        return Perceptron(widths), (torch.empty(batch, widths[0]), torch.empty(batch, widths[-1]))


class Residual(nn.Module):
    """Two convolutions behind norms (group norm: Wu and He 2018), beside one of width 1."""

    def __init__(self, into: int, out: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(groups, into), nn.SiLU(), nn.Conv2d(into, out, 3, padding=1))
        self.second = nn.Sequential(nn.BatchNorm2d(out), nn.ReLU(inplace=True), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(into, out, 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        """Apply the block."""
        return self.skip(x_bchw) + self.second(self.first(x_bchw))


class UNet(nn.Module):
    """Convolutional network that halves and doubles its images (Ronneberger et al. 2015), with attention between."""

    def __init__(self, channels: tuple[int, ...], groups: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.stem = nn.Conv2d(4, channels[0], 3, padding=1)
        self.depthwise = nn.Conv2d(channels[0], channels[0], 3, padding=1, groups=channels[0])
        pairs = list(zip(channels, (*channels[1:], channels[-1]), strict=True))
        self.down = nn.ModuleList(Residual(into, out, groups) for into, out in pairs)
        self.pool = nn.MaxPool2d(2)
        self.halve = nn.Conv2d(channels[-1], channels[-1], 3, stride=2, padding=1)
        self.query_key_value = nn.Linear(channels[-1], 3 * channels[-1])
        self.enlarge = nn.ConvTranspose2d(channels[-1], channels[-1], 2, stride=2)
        self.up = nn.ModuleList(Residual(2 * out, into, groups) for into, out in reversed(pairs))
        self.last = nn.Conv2d(channels[0], 4, 1)

    def attend(self, x_bchw: Tensor) -> Tensor:
        """Apply attention between all places of an image."""
        batch, channels, height, width = x_bchw.shape
        x_btc = x_bchw.flatten(2).transpose(1, 2)
        parts = self.query_key_value(x_btc).view(batch, height * width, 3, self.heads, -1).unbind(2)
        # Written out, unlike in `Attention`: the graph gets two products and a softmax.
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        weights = (queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5).softmax(dim=-1)
        return (weights @ values).permute(0, 1, 3, 2).reshape(batch, channels, height, width)

    def forward(self, x_bchw: Tensor, targets_bchw: Tensor) -> Tensor:
        """Compute the squared error of the image."""
        x_bchw = self.stem(x_bchw)
        x_bchw = x_bchw + self.depthwise(x_bchw)
        kept = []
        for block in self.down:
            x_bchw = block(x_bchw)
            # Skip connections take the result before pooling.
            kept.append(x_bchw)
            x_bchw = self.pool(x_bchw)
        x_bchw = self.enlarge(self.halve(x_bchw))
        x_bchw = x_bchw + self.attend(x_bchw)
        for block in self.up:
            x_bchw = block(torch.cat([F.interpolate(x_bchw, scale_factor=2), kept.pop()], dim=1))
        return (self.last(x_bchw) - targets_bchw).square().mean()


def unet() -> Program:
    """Build four levels on images of 64 by 64."""
    return _unet((256, 512, 1024, 1024), groups=32, heads=16, batch=64, side=64)


def unet_small() -> Program:
    """Build two levels on images of 16 by 16."""
    return _unet((8, 12), groups=4, heads=2, batch=2, side=16)


def _unet(channels: tuple[int, ...], *, groups: int, heads: int, batch: int, side: int) -> Program:
    with torch.device("meta"):
        images = torch.empty(batch, 4, side, side)
        return UNet(channels, groups, heads), (images, images)


FACTORIES: dict[str, Callable[[], Program]] = {
    factory.__name__: factory
    for factory in (
        llama_two_layers,
        llama_18_layers,
        llama_70b,
        llama_small,
        mixtral_four_layers,
        mixtral_small,
        perceptron,
        perceptron_small,
        unet,
        unet_small,
    )
}
"""Factories of all programs by name."""
