"""Programs in JAX whose graphs planners shard: training steps and a decoding step, at full size and small.

A factory takes nothing and returns (function, abstract arguments, names of the donated ones); nothing is allocated.
FACTORIES names them all. The full sizes follow published models where the name says so; the small ones have every
primitive of the large, in dims that two devices can halve.

Shape letters: B batch, T tokens, S cached tokens, D model, N heads, H head, F hidden, V vocabulary, E experts, C an
expert's capacity, L layers; H and W also height and width of images, with C channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = Any
"""Nested dicts of arrays, or of their shapes."""

Program = tuple[Callable[..., Any], tuple[Tree, ...], tuple[str, ...]]
"""A function, its abstract arguments, and the names of those that it may overwrite."""


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array that isn't allocated."""
    return jax.ShapeDtypeStruct(shape, dtype)


def train_program(loss_of: Callable[[Tree, Tree], Array], params: Tree, batch: Tree) -> Program:
    """One step of Adam on a loss of (parameters, batch); its moments are float32 whatever the parameters are."""

    def train_step(params: Tree, optimizer: Tree, batch: Tree) -> tuple[Tree, Tree, Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        with jax.named_scope("adam"):
            params, optimizer = adam(params, grads, optimizer)
        return params, optimizer, loss

    moments = jax.tree.map(lambda leaf: shape_of(*leaf.shape, dtype=jnp.float32), params)
    optimizer = {"mean": moments, "square": moments, "count": shape_of(dtype=jnp.int32)}
    return train_step, (params, optimizer, batch), ("params", "optimizer")


def adam(params: Tree, grads: Tree, optimizer: Tree, rate: float = 1e-3) -> tuple[Tree, Tree]:
    """Parameters and moments after one step (Kingma and Ba 2015, algorithm 1)."""
    count = optimizer["count"] + 1
    steps = count.astype(jnp.float32)
    mean = jax.tree.map(lambda old, grad: 0.9 * old + 0.1 * grad.astype(jnp.float32), optimizer["mean"], grads)
    square = jax.tree.map(
        lambda old, grad: 0.999 * old + 0.001 * jnp.square(grad.astype(jnp.float32)), optimizer["square"], grads
    )

    def updated(param: Array, mean: Array, square: Array) -> Array:
        change = mean / (1 - 0.9**steps) / (jnp.sqrt(square / (1 - 0.999**steps)) + 1e-8)
        return (param.astype(jnp.float32) - rate * change).astype(param.dtype)

    return jax.tree.map(updated, params, mean, square), {"mean": mean, "square": square, "count": count}


def rms_norm(x: Array, scale: Array) -> Array:
    """Divided by the root of the mean square over the last dim."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6) * (1 + scale)).astype(x.dtype)


def cross_entropy(logits_btv: Array, targets_bt: Array) -> Array:
    """The mean over all tokens."""
    log_btv = jax.nn.log_softmax(logits_btv.astype(jnp.float32), axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_btv, targets_bt[..., None], axis=-1))


def rotated(x: Array, positions: Array) -> Array:
    """Rotary position embedding of [B, T, N, H] (Su et al. 2021), halves of H as the pairs."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * speeds
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention(queries: Array, keys: Array, values: Array, mask: Array) -> Array:
    """Attention of [B, T, N, H] to one head of keys and values [B, S, H], where a mask [T, S] allows it."""
    scores = jnp.einsum("btnh,bsh->bnts", queries, keys).astype(jnp.float32) / math.sqrt(queries.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(values.dtype)
    return jnp.einsum("bnts,bsh->btnh", weights, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma:
    """Sizes of a dense transformer with one head of keys and values, gated hidden layers and tied embeddings."""

    layers: int
    model: int
    heads: int
    head: int
    hidden: int
    vocabulary: int
    batch: int
    tokens: int
    is_scanned: bool = False

    def layer(self, stacked: int = 0) -> Tree:
        """The parameters of one layer, or of all in one stack."""
        lead = (stacked,) if stacked else ()
        shapes = {
            "attention_norm": (self.model,),
            "query": (self.model, self.heads, self.head),
            "key_value": (2, self.model, self.head),
            "out": (self.heads, self.head, self.model),
            "hidden_norm": (self.model,),
            "gate_up": (2, self.model, self.hidden),
            "down": (self.hidden, self.model),
        }
        return {name: shape_of(*lead, *shape) for name, shape in shapes.items()}

    def params(self) -> Tree:
        """All parameters."""
        layers = (
            self.layer(self.layers) if self.is_scanned else {str(number): self.layer() for number in range(self.layers)}
        )
        return {
            "embedding": shape_of(self.vocabulary, self.model),
            "layers": layers,
            "norm": shape_of(self.model),
        }

    def attend(self, layer: Tree, x_btd: Array, positions: Array, mask: Array) -> Array:
        """What attention adds."""
        normed = rms_norm(x_btd, layer["attention_norm"])
        queries = rotated(jnp.einsum("btd,dnh->btnh", normed, layer["query"]), positions)
        keys, values = jnp.einsum("btd,kdh->kbth", normed, layer["key_value"])
        keys = rotated(keys[:, :, None, :], positions)[:, :, 0, :]
        return jnp.einsum("btnh,nhd->btd", attention(queries, keys, values, mask), layer["out"])

    def hide(self, layer: Tree, x_btd: Array) -> Array:
        """What the hidden layer adds."""
        gate, up = jnp.einsum("btd,gdf->gbtf", rms_norm(x_btd, layer["hidden_norm"]), layer["gate_up"])
        return jnp.einsum("btf,fd->btd", jax.nn.gelu(gate) * up, layer["down"])

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Cross entropy of the next tokens."""
        positions = jnp.arange(self.tokens)
        mask = jnp.tril(jnp.ones((self.tokens, self.tokens), dtype=bool))

        def through(x_btd: Array, layer: Tree) -> Array:
            with jax.named_scope("attention"):
                x_btd = x_btd + self.attend(layer, x_btd, positions, mask)
            with jax.named_scope("mlp"):
                return x_btd + self.hide(layer, x_btd)

        with jax.named_scope("embedding"):
            x_btd = params["embedding"][batch["tokens"]] * math.sqrt(self.model)
        if self.is_scanned:
            with jax.named_scope("layers"):
                x_btd, _ = lax.scan(lambda x, layer: (through(x, layer), None), x_btd, params["layers"])
        else:
            for number in range(self.layers):
                with jax.named_scope(f"layers.{number}"):
                    x_btd = through(x_btd, params["layers"][str(number)])
        with jax.named_scope("head"):
            logits_btv = jnp.einsum("btd,vd->btv", rms_norm(x_btd, params["norm"]), params["embedding"])
            return cross_entropy(logits_btv, batch["targets"])

    def train_program(self) -> Program:
        """One training step."""
        tokens = shape_of(self.batch, self.tokens, dtype=jnp.int32)
        return train_program(self.loss, self.params(), {"tokens": tokens, "targets": tokens})


GEMMA_2B = Gemma(layers=18, model=2048, heads=8, head=256, hidden=16_384, vocabulary=256_128, batch=16, tokens=2048)
"""The sizes of Gemma 2B (Gemma team 2024, table 1), its vocabulary padded to a multiple of 128."""

SMALL_GEMMA = Gemma(layers=1, model=16, heads=4, head=8, hidden=24, vocabulary=36, batch=2, tokens=6)


def gemma_2b() -> Program:
    """Gemma 2B, its 18 layers one after the other."""
    return GEMMA_2B.train_program()


def gemma_2b_scan() -> Program:
    """Gemma 2B as a loop over stacked layers."""
    return _changed(GEMMA_2B, is_scanned=True).train_program()


def gemma_small() -> Program:
    """One small layer."""
    return SMALL_GEMMA.train_program()


def gemma_small_scan() -> Program:
    """Three small layers as a loop."""
    return _changed(SMALL_GEMMA, layers=3, is_scanned=True).train_program()


def _changed(sizes: Any, **changes: Any) -> Any:
    return type(sizes)(**{name: getattr(sizes, name) for name in sizes.__slots__} | changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Sizes of a transformer whose hidden layers are experts, two of which serve a token up to their capacity."""

    base: Gemma
    experts: int
    capacity: int

    def params(self) -> Tree:
        """All parameters."""
        found = self.base.params()
        for layer in found["layers"].values():
            layer["router"] = shape_of(self.base.model, self.experts)
            layer["gate_up"] = shape_of(2, self.experts, self.base.model, self.base.hidden)
            layer["down"] = shape_of(self.experts, self.base.hidden, self.base.model)
        return found

    def hide(self, layer: Tree, x_btd: Array) -> Array:
        """What the experts add: tokens are sent to their places and back by products (GShard, algorithm 1)."""
        normed = rms_norm(x_btd, layer["hidden_norm"])
        chances_bte = jax.nn.softmax(jnp.einsum("btd,de->bte", normed, layer["router"]).astype(jnp.float32), axis=-1)
        weights_btk, chosen_btk = lax.top_k(chances_bte, 2)
        weights_btk = weights_btk / jnp.sum(weights_btk, axis=-1, keepdims=True)
        chosen_btke = jax.nn.one_hot(chosen_btk, self.experts, dtype=jnp.float32)
        taken_bte = jnp.sum(chosen_btke, axis=2)
        places_bte = jnp.cumsum(taken_bte, axis=1) - taken_bte
        slots_btec = jax.nn.one_hot(places_bte.astype(jnp.int32), self.capacity, dtype=jnp.float32)
        sent_btec = slots_btec * taken_bte[..., None]
        combined_btec = jnp.einsum("btk,btke->bte", weights_btk, chosen_btke)[..., None] * slots_btec
        inside_ebcd = jnp.einsum("btec,btd->ebcd", sent_btec.astype(x_btd.dtype), normed)
        gate, up = jnp.einsum("ebcd,gedf->gebcf", inside_ebcd, layer["gate_up"])
        done_ebcd = jnp.einsum("ebcf,efd->ebcd", jax.nn.silu(gate) * up, layer["down"])
        return jnp.einsum("btec,ebcd->btd", combined_btec.astype(x_btd.dtype), done_ebcd)

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Cross entropy of the next tokens."""
        base = self.base
        positions = jnp.arange(base.tokens)
        mask = jnp.tril(jnp.ones((base.tokens, base.tokens), dtype=bool))
        x_btd = params["embedding"][batch["tokens"]]
        for name, layer in params["layers"].items():
            with jax.named_scope(f"layers.{name}.attention"):
                x_btd = x_btd + base.attend(layer, x_btd, positions, mask)
            with jax.named_scope(f"layers.{name}.experts"):
                x_btd = x_btd + self.hide(layer, x_btd)
        with jax.named_scope("head"):
            logits_btv = jnp.einsum("btd,vd->btv", rms_norm(x_btd, params["norm"]), params["embedding"])
            return cross_entropy(logits_btv, batch["targets"])

    def train_program(self) -> Program:
        """One training step."""
        tokens = shape_of(self.base.batch, self.base.tokens, dtype=jnp.int32)
        return train_program(self.loss, self.params(), {"tokens": tokens, "targets": tokens})


def moe() -> Program:
    """Four layers of the size of Mixtral 8x7B's, with one head of keys and values."""
    base = Gemma(layers=4, model=4096, heads=32, head=128, hidden=14_336, vocabulary=32_000, batch=16, tokens=2048)
    return Mixture(base=base, experts=8, capacity=512).train_program()


def moe_small() -> Program:
    """One small layer of four experts."""
    return Mixture(base=SMALL_GEMMA, experts=4, capacity=10).train_program()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNetwork:
    """Sizes of a network that passes messages along edges (Gilmer et al. 2017), each step with its own weights."""

    nodes: int
    edges: int
    features: int
    latent: int
    hidden: int
    hidden_layers: int
    steps: int

    def params(self) -> Tree:
        """All parameters."""
        return {
            "encoder": self.layers(self.features, self.latent),
            "steps": {
                str(number): {
                    "edge": self.layers(3 * self.latent, self.latent),
                    "node": self.layers(2 * self.latent, self.latent),
                }
                for number in range(self.steps)
            },
            "edge_encoder": self.layers(self.features, self.latent),
            "decoder": self.layers(self.latent, self.features),
        }

    def layers(self, into: int, out: int) -> Tree:
        """Of a perceptron."""
        sizes = [into, *[self.hidden] * self.hidden_layers, out]
        return {
            str(number): {"weight": shape_of(*pair, dtype=jnp.float32), "bias": shape_of(pair[1], dtype=jnp.float32)}
            for number, pair in enumerate(itertools.pairwise(sizes))
        }

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Squared error of what the nodes become."""
        nodes = perceptron(params["encoder"], batch["nodes"])
        edges = perceptron(params["edge_encoder"], batch["edges"])
        for name, step in params["steps"].items():
            with jax.named_scope(f"steps.{name}"):
                ends = [nodes[batch["senders"]], nodes[batch["receivers"]]]
                edges = edges + perceptron(step["edge"], jnp.concatenate([edges, *ends], axis=-1))
                heard = jax.ops.segment_sum(edges, batch["receivers"], num_segments=self.nodes)
                nodes = nodes + perceptron(step["node"], jnp.concatenate([nodes, heard], axis=-1))
        return jnp.mean(jnp.square(perceptron(params["decoder"], nodes) - batch["targets"]))

    def train_program(self) -> Program:
        """One training step."""
        nodes = shape_of(self.nodes, self.features, dtype=jnp.float32)
        ends = shape_of(self.edges, dtype=jnp.int32)
        edges = shape_of(self.edges, self.features, dtype=jnp.float32)
        batch = {"nodes": nodes, "edges": edges, "senders": ends, "receivers": ends, "targets": nodes}
        return train_program(self.loss, self.params(), batch)


def perceptron(layers: Tree, x: Array) -> Array:
    """Linear layers with rectifiers between them."""
    for number, layer in enumerate(layers.values()):
        x = (x if number == 0 else jax.nn.relu(x)) @ layer["weight"] + layer["bias"]
    return x


def graph_network() -> Program:
    """24 steps of messages with perceptrons of three layers of 1,024."""
    return GraphNetwork(
        nodes=2048, edges=65_536, features=128, latent=2048, hidden=1024, hidden_layers=3, steps=24
    ).train_program()


def graph_network_small() -> Program:
    """Two small steps."""
    return GraphNetwork(nodes=10, edges=12, features=6, latent=8, hidden=14, hidden_layers=1, steps=2).train_program()


@dataclass(frozen=True, kw_only=True, slots=True)
class UNet:
    """Sizes of a convolutional network that halves and doubles its images (Ronneberger et al. 2015).

    Levels have residual blocks with group norms, the lowest one attention, the first convolution by groups of channels.
    """

    batch: int
    side: int
    channels: tuple[int, ...]
    blocks: int
    groups: int
    heads: int

    def params(self) -> Tree:
        """All parameters."""
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
                    str(block): self.block(2 * width if block == 0 else width, width) for block in range(self.blocks)
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
        """Of a residual block."""
        shapes = {"scale": (into,), "first": (3, 3, into, out), "second": (3, 3, out, out), "skip": (1, 1, into, out)}
        return {name: shape_of(*shape, dtype=jnp.float32) for name, shape in shapes.items()}

    def through_block(self, block: Tree, x_bhwc: Array) -> Array:
        """A residual block."""
        y_bhwc = conv(jax.nn.silu(self.normed(x_bhwc) * block["scale"]), block["first"])
        return conv(x_bhwc, block["skip"]) + conv(jax.nn.silu(self.normed(y_bhwc)), block["second"])

    def normed(self, x_bhwc: Array) -> Array:
        """Divided by the deviation of a group of channels (Wu and He 2018)."""
        groups = x_bhwc.reshape(*x_bhwc.shape[:-1], self.groups, -1)
        mean = jnp.mean(groups, axis=(1, 2, 4), keepdims=True)
        variance = jnp.mean(jnp.square(groups - mean), axis=(1, 2, 4), keepdims=True)
        return ((groups - mean) * lax.rsqrt(variance + 1e-5)).reshape(x_bhwc.shape)

    def attend(self, layer: Tree, x_bhwc: Array) -> Array:
        """What attention between all places adds."""
        batch, height, width, channels = x_bhwc.shape
        x_btc = x_bhwc.reshape(batch, height * width, channels)
        queries, keys, values = jnp.einsum("btc,kcnd->kbtnd", x_btc, layer["query_key_value"])
        weights = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", queries, keys), axis=-1)
        y_btc = jnp.einsum("btnd,ndc->btc", jnp.einsum("bnts,bsnd->btnd", weights, values), layer["out"])
        return y_btc.reshape(x_bhwc.shape)

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Squared error of the image."""
        x = conv(batch["images"], params["stem"])
        x = x + conv(x, params["depthwise"], groups=x.shape[-1])
        kept = []
        for name, level in params["down"].items():
            with jax.named_scope(f"down.{name}"):
                for block in level["blocks"].values():
                    x = self.through_block(block, x)
                kept.append(x)
                x = conv(x, level["down"], stride=2)
        with jax.named_scope("middle"):
            x = x + self.attend(params["middle"], x)
        for name, level in reversed(params["up"].items()):
            with jax.named_scope(f"up.{name}"):
                x = conv(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), level["up"])
                x = jnp.concatenate([x, kept.pop()], axis=-1)
                for block in level["blocks"].values():
                    x = self.through_block(block, x)
        return jnp.mean(jnp.square(conv(x, params["last"]) - batch["targets"]))

    def train_program(self) -> Program:
        """One training step."""
        images = shape_of(self.batch, self.side, self.side, 4, dtype=jnp.float32)
        return train_program(self.loss, self.params(), {"images": images, "targets": images})


def conv(x_bhwc: Array, weight: Array, *, stride: int = 1, groups: int = 1) -> Array:
    """A convolution that keeps the size of images, but for its stride."""
    return lax.conv_general_dilated(
        x_bhwc,
        weight,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def unet() -> Program:
    """Four levels of three blocks on images of 64 by 64."""
    return UNet(batch=64, side=64, channels=(256, 512, 1024, 1024), blocks=3, groups=32, heads=32).train_program()


def unet_small() -> Program:
    """Two levels of a block on images of 8 by 8."""
    return UNet(batch=2, side=8, channels=(8, 12), blocks=1, groups=4, heads=2).train_program()


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Sizes of a transformer that writes one token for each of a batch of texts."""

    base: Gemma
    cached: int

    def decode(self, params: Tree, cache: Tree, tokens: Array, position: Array) -> tuple[Array, Tree]:
        """The likeliest tokens, and the cache with the new keys and values."""
        x_btd = params["embedding"][tokens][:, None, :]
        positions = position[None]
        mask = (jnp.arange(self.cached) <= position)[None]
        found = {}
        for name, layer in params["layers"].items():
            with jax.named_scope(f"layers.{name}"):
                normed = rms_norm(x_btd, layer["attention_norm"])
                queries = rotated(jnp.einsum("btd,dnh->btnh", normed, layer["query"]), positions)
                key, value = jnp.einsum("btd,kdh->kbth", normed, layer["key_value"])
                key = rotated(key[:, :, None, :], positions)[:, :, 0, :]
                keys = lax.dynamic_update_slice(cache[name]["keys"], key, (0, position, 0))
                values = lax.dynamic_update_slice(cache[name]["values"], value, (0, position, 0))
                heads = attention(queries, keys, values, mask)
                x_btd = x_btd + jnp.einsum("btnh,nhd->btd", heads, layer["out"])
                x_btd = x_btd + self.base.hide(layer, x_btd)
                found[name] = {"keys": keys, "values": values}
        logits_btv = jnp.einsum("btd,vd->btv", rms_norm(x_btd, params["norm"]), params["embedding"])
        return jnp.argmax(logits_btv[:, 0, :], axis=-1), found

    def program(self) -> Program:
        """One step of decoding."""
        base = self.base
        cached = shape_of(base.batch, self.cached, base.head)
        cache = {str(number): {"keys": cached, "values": cached} for number in range(base.layers)}
        tokens = shape_of(base.batch, dtype=jnp.int32)
        return self.decode, (base.params(), cache, tokens, shape_of(dtype=jnp.int32)), ("cache",)


def decode() -> Program:
    """Gemma 2B with 2,048 cached tokens of 64 texts."""
    return Decoder(base=_changed(GEMMA_2B, batch=64, tokens=1), cached=2048).program()


def decode_small() -> Program:
    """One small layer."""
    return Decoder(base=_changed(SMALL_GEMMA, tokens=1), cached=6).program()


FACTORIES: dict[str, Callable[[], Program]] = {
    factory.__name__: factory
    for factory in (
        gemma_2b,
        gemma_2b_scan,
        gemma_small,
        gemma_small_scan,
        moe,
        moe_small,
        graph_network,
        graph_network_small,
        unet,
        unet_small,
        decode,
        decode_small,
    )
}
"""Every program by its name."""
