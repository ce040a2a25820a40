"""Operators in forms that no module of the zoo has, as functions whose results are summed up and differentiated."""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn

from benchmarks.zoo.torch_modules import FACTORIES, SMALL, decoder_program


class Varied(nn.Module):
    """A function of a parameter and inputs, whose loss is the sum of all that it returns."""

    def __init__(self, function, shape):
        super().__init__()
        self.x = nn.Parameter(torch.empty(shape, device="meta"))
        self.function = function

    def forward(self, *inputs):
        """The sum of squares."""
        return sum((one.float() * one.float()).sum() for one in self.function(self.x, *inputs))


def reduced(x):
    """Reductions of some or all dims, cumulative and ordered ones, and what only tells a place."""
    return (
        x.amax((0, 2)),
        x.amin(1, keepdim=True),
        x.prod(1),
        x.mean(),
        x.std(1),
        x.var((0, 2), unbiased=False),
        x.logsumexp(2),
        x.norm(dim=1),
        x.max(1).values,
        x * (x > 0.5).any(1, keepdim=True) * (x > 0.1).all(2, keepdim=True),
        x * x.argmax(2, keepdim=True),
        x.cumsum(1),
        x.sort(1).values,
        x.topk(2, dim=2).values,
        x.softmax(1),
        x.log_softmax(0),
    )


def moved(x):
    """Cut, joined, turned, padded, and put together again."""
    first, second = x.split([2, 4], dim=1)
    return (
        first,
        torch.cat([second, first], dim=1),
        torch.stack([x, x * 2], dim=2),
        x.flip((0, 2)),
        x.roll(1, 1),
        F.pad(x, (1, 2, 0, 1)),
        x.select(1, 3),
        x[:, 1::2, :4],
        x.unbind(0)[1],
        x.repeat(2, 1, 3),
        x.tril(),
        x.squeeze(),
        x[:, None].expand(4, 2, 6, 8) * 2,
        x.masked_fill(x > 0.5, 0.0),
        x.view(2, 2, 6, 4, 2).permute(1, 3, 0, 2, 4).reshape(8, 24) * 2,
        x.reshape(8, 24).t().contiguous(),
        x.reshape(3, 64) * 2,
        torch.select_scatter(x, x[:, 0], 1, 2),
        torch.slice_scatter(x, first, 1, 3, 5),
    )


def looked_up(x, indices, places):
    """Looked up and written by one index or several, side by side or not, and along a dim."""
    near, far = indices % 4, indices % 8
    return (
        x[:, indices % 6],
        x[near],
        x[near, indices % 6],
        x[near, :, far],
        x.gather(1, places),
        torch.zeros_like(x).scatter(1, places, x[:, :3, :]),
        torch.zeros_like(x).scatter_add(1, places, x[:, :3, :]),
        x.scatter_reduce(1, places, x[:, :3, :] * 2, "amax", include_self=False),
        x.index_add(0, near, torch.ones(10, 6, 8) * x[0]),
        torch.index_put(x, (near, indices % 6), x[0, 0], accumulate=True),
        F.embedding(indices % 6, x[0], padding_idx=0),
        F.one_hot(indices % 6, 6).float() @ x[0],
        torch.where((x > 0.5)[near, indices % 6], x[near, 0], x[near, 1]),
        torch.where((x > 0.5).gather(1, places), x[:, :3, :], 0.0),
    )


def looked_up_in_views(x, indices):
    """Looked up and written in dims that are several dims elsewhere."""
    rows, indices = x.reshape(24, 8), (indices * 7 + torch.arange(10)) % 24
    return (
        rows[indices],
        F.embedding(indices, rows * 2, padding_idx=5),
        rows.gather(0, indices[:, None].expand(10, 8)),
        torch.scatter_add(rows, 0, indices[:, None].expand(10, 8), rows[:10]).view(4, 6, 8),
        torch.index_put(rows, (indices,), rows[:10], accumulate=True).view(4, 6, 8),
    )


def multiplied(x):
    """Products of all ranks."""
    return (
        x @ x.transpose(1, 2),
        torch.baddbmm(x[:, :, :6], x, x.transpose(1, 2)),
        torch.addmm(x[0, 0, 0], x[0], x[1].t()),
        x[0] @ x[0, 0],
        x[0, 0].dot(x[0, 1])[None],
        torch.outer(x[0, 0], x[1, 1]),
        torch.einsum("abc,dbc->ad", x, x * 2),
        torch.addcmul(x, x, x),
        torch.lerp(x, x * 2, 0.3),
        x.clamp(0.2, 0.8),
        x.pow(3) + torch.rsqrt(x) + x.exp() + x.tanh() + x.sigmoid(),
    )


def convolved(x):
    """In one dim and two, strided, dilated, in groups and transposed, without and with a window."""
    row = x[:, :, 0, :]
    return (
        F.conv2d(x, x[:2, :6, :3, :3], stride=2, groups=2),
        F.conv2d(x, x[:, :12, :3, :3], padding=2, dilation=2),
        F.conv2d(x, x[:, :12, :1, :1], x[0, 0, 0, :4]),
        F.conv_transpose2d(x, x.transpose(0, 1)[:, :2, :2, :2], stride=2, groups=2),
        F.conv_transpose2d(x, x.transpose(0, 1)[:, :4, :1, :1]),
        F.conv1d(row, row[:, :, :3], padding=1),
    )


def pooled(x):
    """Windows, sizes in space, and norms of channels."""
    return (
        F.max_pool2d(x, 3, stride=2, padding=1),
        F.avg_pool2d(x, 2),
        F.adaptive_avg_pool2d(x, 1),
        F.adaptive_avg_pool2d(x, 4),
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.pixel_shuffle(x, 2),
        F.group_norm(x, 4, x[0, :, 0, 0], x[1, :, 0, 0]),
        F.instance_norm(x),
        F.layer_norm(x, (8, 8), x[0, 0], x[0, 1]),
        F.rms_norm(x, (8,), x[0, 0, 0]),
        F.batch_norm(x, None, None, training=True),
    )


def attended(x):
    """Fused attention with groups of queries, causal, with a mask, and without a kernel for it."""
    queries = torch.cat([x, x * 2], dim=1)
    mask = torch.ones(8, 8).tril() > 0
    return (
        F.scaled_dot_product_attention(queries, x, x * 3, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(x, x * 2, x, attn_mask=mask),
        F.scaled_dot_product_attention(x, x * 2, x * 3),
    )


def lost(x, indices):
    """Losses."""
    wide = x.reshape(24, 8)
    return tuple(
        one[None]
        for one in (
            F.mse_loss(x, x * 2),
            F.smooth_l1_loss(x, x * 3),
            F.huber_loss(x, x * 3),
            F.binary_cross_entropy_with_logits(x, x * 0.5),
            F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)),
            F.kl_div(x.log_softmax(1), x.softmax(1)),
            F.cross_entropy(wide[:10], indices % 8, label_smoothing=0.1),
            F.cross_entropy(x, indices[:8].expand(4, 8) % 6),
        )
    )


def factorized(x):
    """Factorizations, decompositions and solves of batches of matrices, of which half of the last dim is taken."""
    linalg, tall = torch.linalg, x[..., :4]
    return (
        linalg.inv(x),
        linalg.slogdet(x)[1][:, None],
        linalg.qr(tall)[1],
        linalg.svdvals(tall),
        linalg.solve(x, tall),
        linalg.solve_triangular(x, tall, upper=True),
        linalg.lu(x)[2],
        linalg.matrix_exp(x),
        x.diagonal(dim1=1, dim2=2),
        torch.histc(x.detach(), 4, 0.0, 1.0)[:, None] * x[0, 0],
    )


def transformed(x):
    """Fourier transforms of one dim and two."""
    wave = torch.fft.rfft2(x)
    return torch.fft.irfft2(wave), torch.fft.fft(x, dim=1).real


def grouped(x):
    """Products of groups of rows, columns and contracted elements, and a batched one; the groups have unequal sizes."""
    rows, ends = x.reshape(32, 16), torch.arange(1, 5, dtype=torch.int32) ** 2 * 2
    return (
        torch._grouped_mm(rows, x.mT, offs=ends),
        torch._grouped_mm(x, rows.t(), offs=ends),
        torch._grouped_mm(rows.t(), rows * 2, offs=ends),
        torch._grouped_mm(x, x.mT),
    )


ROWS, IMAGE = (4, 6, 8), (4, 12, 8, 8)


def _numbers(*shape):
    return torch.empty(shape, dtype=torch.int64, device="meta")


def searched(x):
    """Searched in sorted boundaries, and compared with all other vectors."""
    boundaries = torch.linspace(0.2, 0.8, 5)
    rows = x[0].sort(1).values.detach()
    return (
        x * torch.bucketize(x.detach(), boundaries),
        x[0] * torch.searchsorted(rows, x[1].detach()),
        torch.cdist(x, x[:, :3] * 2),
        torch.cdist(x[0], x[1] * 3, p=1.0),
        torch.cdist(x, x[0] * 2, p=3.0),
    )


def bagged(x, bags, flat):
    """Looked up in bags of one length and of several, and weights with a norm of their own."""
    table, scales = x.reshape(24, 8), x[0, 0, :4].expand(6, 4)
    begins = torch.tensor([0, 3, 3, 10])
    return (
        F.embedding_bag(bags, table),
        F.embedding_bag(bags, table, mode="max", padding_idx=1),
        F.embedding_bag(bags, table, mode="mean", padding_idx=1),
        F.embedding_bag(bags, table, mode="sum", per_sample_weights=scales),
        F.embedding_bag(flat, table, begins, mode="sum", padding_idx=2),
        F.embedding_bag(flat, table, begins, mode="mean"),
        torch._weight_norm(x * 2, x[:, :1, :1] + 1, 0),
    )


VARIANTS = {
    "reduced": (Varied(reduced, ROWS), ()),
    "moved": (Varied(moved, ROWS), ()),
    "looked_up": (Varied(looked_up, ROWS), (_numbers(10), _numbers(4, 3, 8))),
    "looked_up_in_views": (Varied(looked_up_in_views, ROWS), (_numbers(10),)),
    "multiplied": (Varied(multiplied, ROWS), ()),
    "convolved": (Varied(convolved, IMAGE), ()),
    "pooled": (Varied(pooled, IMAGE), ()),
    "attended": (Varied(attended, (2, 2, 8, 8)), ()),
    "factorized": (Varied(factorized, (4, 8, 8)), ()),
    "transformed": (Varied(transformed, (4, 8, 8)), ()),
    "grouped": (Varied(grouped, (4, 8, 16)), ()),
    "searched": (Varied(searched, ROWS), ()),
    "bagged": (Varied(bagged, ROWS), (_numbers(6, 4), _numbers(12))),
    "lost": (Varied(lost, ROWS), (_numbers(10),)),
}
"""Modules and their inputs."""

PROGRAMS = {
    **VARIANTS,
    "llama": decoder_program(SMALL, dtype=torch.float32),
    "mixtral": decoder_program(replace(SMALL, experts=4, capacity=10), dtype=torch.float32),
    "perceptron": FACTORIES["perceptron_small"](),
    "unet": FACTORIES["unet_small"](),
}
"""These and the small modules of the zoo, in float32, so that sums can be compared."""
