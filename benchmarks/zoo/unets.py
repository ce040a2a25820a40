"""Training step of a U-Net: a convolutional network that halves and doubles its images, with attention at the bottom.

Shape letters: B batch, H height, W width, C channels, T places of an image and S those attended to, N heads, D head, K
query, key or value.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.zoo.programs import Program, Tree, shape_of, train_program


@dataclass(frozen=True, kw_only=True, slots=True)
class UNet:
    """Sizes of a convolutional network that halves and doubles its images (Ronneberger et al. 2015).

    Levels have residual blocks with group norms. The lowest level has attention. The first convolution is depthwise.

    Attributes:
        batch: Number of images of a step.
        side: Height and width of an image.
        channels: Number of channels of each level, the highest level first.
        blocks: Number of blocks of each level on the way down.
        groups: Number of groups of channels that are normed together.
        heads: Number of heads of attention.
        up_blocks: Number of blocks of each level on the way up; 0 for as many as on the way down.
    """

    batch: int
    side: int
    channels: tuple[int, ...]
    blocks: int
    groups: int
    heads: int
    up_blocks: int = 0

    def params(self) -> Tree:
        """Return the shapes of all parameters."""
        widths = self.channels
        down = {
            str(level): {
                "blocks": {str(block): self.block(width, width) for block in range(self.blocks)},
                "down": shape_of(3, 3, width, widths[min(level + 1, len(widths) - 1)], dtype=jnp.float32),
            }
            for level, width in enumerate(widths)
        }
        up = {
            str(level): {
                "up": shape_of(3, 3, widths[min(level + 1, len(widths) - 1)], width, dtype=jnp.float32),
                "blocks": {
                    str(block): self.block(2 * width if block == 0 else width, width)
                    for block in range(self.up_blocks or self.blocks)
                },
            }
            for level, width in enumerate(widths)
        }
        last = widths[-1]
        return {
            "stem": shape_of(3, 3, 4, widths[0], dtype=jnp.float32),
            "depthwise": shape_of(3, 3, 1, widths[0], dtype=jnp.float32),
            "down": down,
            "middle": {
                "query_key_value": shape_of(3, last, self.heads, last // self.heads, dtype=jnp.float32),
                "out": shape_of(self.heads, last // self.heads, last, dtype=jnp.float32),
            },
            "up": up,
            "last": shape_of(1, 1, widths[0], 4, dtype=jnp.float32),
        }

    def block(self, into: int, out: int) -> Tree:
        """Return the shapes of a residual block's parameters."""
        shapes = {"scale": (into,), "first": (3, 3, into, out), "second": (3, 3, out, out), "skip": (1, 1, into, out)}
        return {name: shape_of(*shape, dtype=jnp.float32) for name, shape in shapes.items()}

    def through_block(self, block: Tree, x_bhwc: Array) -> Array:
        """Apply a residual block."""
        y_bhwc = conv(jax.nn.silu(self.normed(x_bhwc) * block["scale"]), block["first"])
        return conv(x_bhwc, block["skip"]) + conv(jax.nn.silu(self.normed(y_bhwc)), block["second"])

    def normed(self, x_bhwc: Array) -> Array:
        """Apply group norm (Wu and He 2018)."""
        # Statistics are over height, width and the channels of a group.
        groups = x_bhwc.reshape(*x_bhwc.shape[:-1], self.groups, -1)
        mean = jnp.mean(groups, axis=(1, 2, 4), keepdims=True)
        variance = jnp.mean(jnp.square(groups - mean), axis=(1, 2, 4), keepdims=True)
        return ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x_bhwc.shape)

    def attend(self, layer: Tree, x_bhwc: Array) -> Array:
        """Apply attention between all places of an image."""
        batch, height, width, channels = x_bhwc.shape
        x_btc = x_bhwc.reshape(batch, height * width, channels)
        queries, keys, values = jnp.einsum("btc,kcnd->kbtnd", x_btc, layer["query_key_value"])
        weights = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", queries, keys), axis=-1)
        y_btc = jnp.einsum("btnd,ndc->btc", jnp.einsum("bnts,bsnd->btnd", weights, values), layer["out"])
        return y_btc.reshape(x_bhwc.shape)

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Compute the squared error of the image."""
        x = conv(batch["images"], params["stem"])
        x = x + conv(x, params["depthwise"], groups=x.shape[-1])
        kept = []
        for name, level in params["down"].items():
            with jax.named_scope(f"down.{name}"):
                for block in level["blocks"].values():
                    x = self.through_block(block, x)
                # Skip connections take the result before downsampling.
                kept.append(x)
                x = conv(x, level["down"], stride=2)
        with jax.named_scope("middle"):
            x = x + self.attend(params["middle"], x)
        for name, level in reversed(params["up"].items()):
            with jax.named_scope(f"up.{name}"):
                x = conv(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), level["up"])
                # The first block after a skip connection has twice the channels.
                x = jnp.concatenate([x, kept.pop()], axis=-1)
                for block in level["blocks"].values():
                    x = self.through_block(block, x)
        return jnp.mean(jnp.square(conv(x, params["last"]) - batch["targets"]))

    def train_program(self) -> Program:
        """Build one training step."""
        images = shape_of(self.batch, self.side, self.side, 4, dtype=jnp.float32)
        return train_program(self.loss, self.params(), {"images": images, "targets": images})


def conv(x_bhwc: Array, weight: Array, *, stride: int = 1, groups: int = 1) -> Array:
    """Apply a convolution that keeps the size of images except for its stride."""
    return lax.conv_general_dilated(
        x_bhwc, weight, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def unet() -> Program:
    """Build four levels of three blocks on images of 64 by 64."""
    return UNet(batch=64, side=64, channels=(256, 512, 1024, 1024), blocks=3, groups=32, heads=32).train_program()


WIDE = UNet(batch=64, side=64, channels=(1024, 2048, 4000), blocks=3, up_blocks=4, groups=32, heads=32)
"""Blocks that TOAST, section 5.1, lists: 9 on the way down, 12 on the way up, and attention of 32 heads between them.

The widths are chosen to give 3.58 B parameters; the paper states 3.6 B, and no widths.
"""


def unet_3b() -> Program:
    """Build three levels of three blocks, and of four on the way up, on images of 64 by 64."""
    return WIDE.train_program()


def unet_small() -> Program:
    """Build two levels of one block on images of 8 by 8."""
    return UNet(batch=2, side=8, channels=(8, 12), blocks=1, groups=4, heads=2).train_program()
