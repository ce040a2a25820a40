"""A small decoder in plain JAX with Adam, as its author wrote it; `step` is all that Meshtune needs."""

import jax
import jax.numpy as jnp

LAYERS, VOCABULARY, MODEL, HEADS, HIDDEN = 2, 1024, 256, 4, 1024
ROWS, LENGTH = 8, 64


def norm(x, scale):
    """Return a root-mean-square norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(layer, x):
    """Return causal attention; b rows, t and s tokens, d model, n heads, h head."""
    q, k, v = (jnp.einsum("btd,dnh->bnth", x, layer[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bnts,bnsh,nhd->btd", shares, v, layer["out"])


def loss_of(params, tokens, labels):
    """Return the mean loss of a batch."""
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = x + attention(layer, norm(x, layer["norm1"]))
        x = x + jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    logs = jax.nn.log_softmax(norm(x, params["norm"]) @ params["head"], axis=-1)
    return -jnp.mean(jnp.take_along_axis(logs, labels[..., None], axis=-1))


def train_step(params, moments, batch):
    """Return parameters and moments after one step of Adam, and the loss before it."""
    loss, grads = jax.value_and_grad(loss_of)(params, batch["tokens"], batch["labels"])
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments["second"], grads)
    params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return params, {"first": first, "second": second}, loss


def step():
    """Return the function, its abstract arguments, and the arguments whose memory the results take over."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    heads = array(MODEL, HEADS, MODEL // HEADS)
    layer = {
        "norm1": array(MODEL),
        "q": heads,
        "k": heads,
        "v": heads,
        "out": array(HEADS, MODEL // HEADS, MODEL),
        "norm2": array(MODEL),
        "up": array(MODEL, HIDDEN),
        "down": array(HIDDEN, MODEL),
    }
    params = {
        "embedding": array(VOCABULARY, MODEL),
        "layers": [layer] * LAYERS,
        "norm": array(MODEL),
        "head": array(MODEL, VOCABULARY),
    }
    tokens = array(ROWS, LENGTH, dtype=jnp.int32)
    moments = {"first": params, "second": params}
    return train_step, (params, moments, {"tokens": tokens, "labels": tokens}), ("params", "moments")
