"""Training steps of networks that packages of JAX bring, for planners: nothing of the networks is written here.

A factory takes whether the network is to be small, so that virtual devices can run it, and returns the step, a function
that makes its arguments, and the names of the arguments that the step may overwrite. The optimizer is optax's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageStep:
    """A training step of a network of a package.

    Attributes:
        step: Function of the parameters, the optimizer's state and the batch that returns the first two and the loss.
        start: Function that makes these three.
        donated: Names of the arguments that the step may overwrite.
    """

    step: Callable[..., Any]
    start: Callable[[], tuple[Tree, ...]]
    donated: tuple[str, ...] = ("params", "moments")


def trained(
    loss_of: Callable[[Tree, Tree], jax.Array], start: Callable[[], Tree], batch: Mapping[str, Any]
) -> PackageStep:
    """Build a step of AdamW on a loss of parameters, which `start` makes, and a batch."""
    import optax  # noqa: PLC0415 # as all packages here, it may be missing

    optimizer = optax.adamw(1e-3)

    def train_step(params: Tree, moments: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def started() -> tuple[Tree, ...]:
        params = start()
        return params, optimizer.init(params), {name: jnp.asarray(value) for name, value in batch.items()}

    return PackageStep(step=train_step, start=started)


def _tokens(*shape: int, most: int) -> np.ndarray:
    return (7 * np.arange(np.prod(shape), dtype=np.int32) % most).reshape(shape)


def _numbers(*shape: int) -> np.ndarray:
    """Return numbers that repeat nowhere near, between -1 and 1."""
    return np.cos(1.7 * np.arange(np.prod(shape), dtype=np.float64)).reshape(shape).astype(np.float32)


def _next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    import optax  # noqa: PLC0415 # as above

    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _class_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    import optax  # noqa: PLC0415 # as above

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformers_gpt2(*, small: bool) -> PackageStep:
    """Build GPT-2 of transformers 4, whose later versions have no models for JAX."""
    from transformers import GPT2Config  # noqa: PLC0415 # as above
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule  # noqa: PLC0415 # as above

    batch, length = (8, 16) if small else (32, 512)
    config = (
        GPT2Config(vocab_size=128, n_positions=length, n_embd=32, n_layer=2, n_head=4)
        if small
        else GPT2Config(vocab_size=50_304, n_positions=length, n_layer=4)
    )
    module = FlaxGPT2LMHeadModule(config)
    ids = _tokens(batch, length, most=config.vocab_size)

    def apply(params: Tree, ids: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(length), ids.shape)
        return module.apply({"params": params}, ids, jnp.ones_like(ids), places).logits

    def start() -> Tree:
        one = jnp.ones((1, length), dtype=jnp.int32)
        return module.init(jax.random.key(0), one, one, one)["params"]

    return trained(lambda params, data: _next_token_loss(apply(params, data["ids"]), data["ids"]), start, {"ids": ids})


def penzai_llama(*, small: bool) -> PackageStep:
    """Build Llama of penzai."""
    from penzai import pz  # noqa: PLC0415 # as above
    from penzai.models.transformer.variants import llamalike_common  # noqa: PLC0415 # as above

    batch, length = (8, 16) if small else (16, 1024)
    sizes = (
        {"embedding_dim": 32, "projection_dim": 8, "mlp_hidden_dim": 64, "num_decoder_blocks": 2, "vocab_size": 128}
        if small
        else {
            "embedding_dim": 1024,
            "projection_dim": 128,
            "mlp_hidden_dim": 2816,
            "num_decoder_blocks": 3,
            "vocab_size": 32_000,
        }
    )
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2 if small else 4,
        query_head_multiplier=2,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        rope_wavelength=10_000,
        rms_norm_eps=1e-6,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        final_logit_softcap=None,
        attn_logits_soft_cap=None,
        query_scaling_factor="default",
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
        use_layer_stack=False,
        **sizes,
    )

    def build(key: jax.Array) -> Any:
        return llamalike_common.build_llamalike_transformer(config, init_base_rng=key)

    def parts(model: Any) -> tuple[Any, Any]:
        return pz.unbind_params(model, freeze=True)

    skeleton, values = parts(build(jax.random.key(0)))
    tree = jax.tree.structure(values)

    def loss(params: Tree, data: Tree) -> jax.Array:
        model = pz.bind_variables(skeleton, jax.tree.unflatten(tree, params))
        ids = pz.nx.wrap(data["ids"]).tag("batch", "seq")
        places = pz.nx.wrap(jnp.arange(length)).tag("seq")
        logits = model(ids, token_positions=places).unwrap("batch", "seq", "vocabulary")
        return _next_token_loss(logits, data["ids"])

    def start() -> Tree:
        return jax.tree.leaves(values)

    return trained(loss, start, {"ids": _tokens(batch, length, most=sizes["vocab_size"])})


def equinox_esm2(*, small: bool) -> PackageStep:
    """Build ESM2 of esm2quinox, in equinox: its layers are a loop."""
    import equinox as eqx  # noqa: PLC0415 # as above
    import esm2quinox  # noqa: PLC0415 # as above

    batch, length = (8, 16) if small else (64, 256)
    sizes = (
        {"num_layers": 2, "embed_size": 32, "num_heads": 4}
        if small
        else {"num_layers": 4, "embed_size": 640, "num_heads": 20}
    )
    build = functools.partial(esm2quinox.ESM2, token_dropout=False, **sizes)
    shapes = eqx.filter_eval_shape(build, key=jax.random.key(0))
    rest = eqx.filter(shapes, lambda leaf: not _is_float(leaf), is_leaf=None)

    def loss(params: Tree, data: Tree) -> jax.Array:
        model = eqx.combine(params, rest)
        logits = jax.vmap(lambda ids: model(ids).logits)(data["ids"])
        return _next_token_loss(logits, data["ids"])

    def start() -> Tree:
        return eqx.filter(build(key=jax.random.key(0)), eqx.is_inexact_array)

    return trained(loss, start, {"ids": 4 + _tokens(batch, length, most=20)})


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def jraph_network(*, small: bool) -> PackageStep:
    """Build two rounds of jraph's GraphNetwork with perceptrons of Haiku."""
    import haiku as hk  # noqa: PLC0415 # as above
    import jraph  # noqa: PLC0415 # as above

    nodes, edges, width = (64, 256, 16) if small else (8_192, 65_536, 256)

    def mlp(*given: jax.Array) -> jax.Array:
        return hk.nets.MLP([width, width])(jnp.concatenate(given, axis=-1))

    @hk.without_apply_rng
    @hk.transform
    def net(node: jax.Array, edge: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        graph = jraph.GraphsTuple(
            nodes=node,
            edges=edge,
            senders=senders,
            receivers=receivers,
            globals=None,
            n_node=jnp.array([nodes]),
            n_edge=jnp.array([edges]),
        )
        for _ in range(2):
            graph = jraph.GraphNetwork(
                update_edge_fn=lambda edge, sent, received, _: mlp(edge, sent, received),
                update_node_fn=lambda node, sent, received, _: mlp(node, sent, received),
            )(graph)
        return hk.Linear(1)(graph.nodes)[:, 0]

    batch = {
        "node": _numbers(nodes, width),
        "edge": _numbers(edges, width),
        "senders": _tokens(edges, most=nodes),
        "receivers": _tokens(edges, most=nodes - 1),
        "target": _numbers(nodes),
    }

    def loss(params: Tree, data: Tree) -> jax.Array:
        found = net.apply(params, data["node"], data["edge"], data["senders"], data["receivers"])
        return jnp.mean((found - data["target"]) ** 2)

    def start() -> Tree:
        given = {name: jnp.asarray(value) for name, value in batch.items() if name != "target"}
        return net.init(jax.random.key(0), **given)

    return trained(loss, start, batch)


def e3x_messages(*, small: bool) -> PackageStep:
    """Build two rounds of E3x's equivariant message passing."""
    import e3x  # noqa: PLC0415 # as above
    from flax import linen  # noqa: PLC0415 # as above

    atoms, pairs, features = (16, 64, 8) if small else (1_024, 16_384, 64)

    class Net(linen.Module):
        """Message passing over pairs of atoms."""

        @linen.compact
        def __call__(self, places: jax.Array, kinds: jax.Array, to: jax.Array, away: jax.Array) -> jax.Array:
            basis = e3x.nn.basis(
                places[away] - places[to],
                max_degree=2,
                num=8,
                radial_fn=e3x.nn.reciprocal_bernstein,
                cutoff_fn=functools.partial(e3x.nn.smooth_cutoff, cutoff=5.0),
            )
            x = e3x.nn.Embed(num_embeddings=16, features=features)(kinds)
            for _ in range(2):
                y = e3x.nn.MessagePass(max_degree=2)(x, basis, dst_idx=to, src_idx=away)
                y = e3x.nn.silu(e3x.nn.Dense(features)(e3x.nn.add(x, y)))
                x = e3x.nn.add(x, e3x.nn.Dense(features)(y))
            return e3x.nn.Dense(1)(e3x.nn.change_max_degree_or_type(x, max_degree=0, include_pseudotensors=False))[
                :, 0, 0, 0
            ]

    net = Net()
    batch = {
        "places": 2 * _numbers(atoms, 3),
        "kinds": _tokens(atoms, most=16),
        "to": _tokens(pairs, most=atoms),
        "away": _tokens(pairs, most=atoms - 1),
        "target": _numbers(atoms),
    }

    def loss(params: Tree, data: Tree) -> jax.Array:
        found = net.apply(params, data["places"], data["kinds"], data["to"], data["away"])
        return jnp.mean((found - data["target"]) ** 2)

    def start() -> Tree:
        given = [jnp.asarray(batch[name]) for name in ("places", "kinds", "to", "away")]
        return net.init(jax.random.key(0), *given)

    return trained(loss, start, batch)


def diffrax_ode(*, small: bool) -> PackageStep:
    """Build a neural differential equation of diffrax, with a perceptron of equinox and fixed steps."""
    import diffrax  # noqa: PLC0415 # as above
    import equinox as eqx  # noqa: PLC0415 # as above

    batch, width, hidden = (8, 16, 32) if small else (8_192, 256, 1_024)
    build = functools.partial(eqx.nn.MLP, width, width, hidden, 2, activation=jax.nn.softplus)
    shapes = eqx.filter_eval_shape(build, key=jax.random.key(0))
    rest = eqx.filter(shapes, lambda leaf: not _is_float(leaf))

    def loss(params: Tree, data: Tree) -> jax.Array:
        model = eqx.combine(params, rest)

        def solved(begin: jax.Array) -> jax.Array:
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda _, state, __: model(state)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.25,
                y0=begin,
                max_steps=8,
            )
            return found.ys[-1]

        return jnp.mean((jax.vmap(solved)(data["begin"]) - data["end"]) ** 2)

    def start() -> Tree:
        return eqx.filter(build(key=jax.random.key(0)), eqx.is_inexact_array)

    return trained(loss, start, {"begin": _numbers(batch, width), "end": _numbers(batch, width) / 2})


def numpyro_vae(*, small: bool) -> PackageStep:
    """Build the evidence lower bound of NumPyro for a variational autoencoder of JAX's own stax."""
    import numpyro  # noqa: PLC0415 # as above
    from jax.example_libraries import stax  # noqa: PLC0415 # as above
    from numpyro import distributions  # noqa: PLC0415 # as above

    batch, pixels, hidden, latent = (8, 64, 32, 8) if small else (16_384, 784, 1_024, 64)
    encoder = stax.serial(
        stax.Dense(hidden),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(stax.Dense(latent), stax.serial(stax.Dense(latent), stax.Exp)),
    )
    decoder = stax.serial(stax.Dense(hidden), stax.Softplus, stax.Dense(pixels), stax.Sigmoid)

    def model(image: jax.Array) -> None:
        decode = numpyro.module("decoder", decoder, (batch, latent))
        with numpyro.plate("batch", batch):
            z = numpyro.sample("z", distributions.Normal(0, 1).expand([latent]).to_event(1))
            numpyro.sample("image", distributions.Bernoulli(decode(z)).to_event(1), obs=image)

    def guide(image: jax.Array) -> None:
        mean, deviation = numpyro.module("encoder", encoder, (batch, pixels))(image)
        with numpyro.plate("batch", batch):
            numpyro.sample("z", distributions.Normal(mean, deviation).to_event(1))

    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-3), numpyro.infer.Trace_ELBO())
    image = (_numbers(batch, pixels) > 0).astype(np.float32)

    def loss(params: Tree, data: Tree) -> jax.Array:
        return svi.loss.loss(jax.random.key(1), params, model, guide, data["image"]) / batch

    def start() -> Tree:
        return svi.get_params(svi.init(jax.random.key(0), jnp.asarray(image)))

    return trained(loss, start, {"image": image})


def pix_upscaler(*, small: bool) -> PackageStep:
    """Build convolutions of Haiku trained by dm-pix's structural similarity of its augmented images."""
    import dm_pix as pix  # noqa: PLC0415 # as above
    import haiku as hk  # noqa: PLC0415 # as above

    batch, side, width = (8, 16, 4) if small else (64, 128, 64)

    @hk.without_apply_rng
    @hk.transform
    def net(image: jax.Array) -> jax.Array:
        for _ in range(3):
            image = jax.nn.relu(hk.Conv2D(width, 3)(image))
        return jax.nn.sigmoid(pix.depth_to_space(hk.Conv2D(12, 3)(image), 2))

    def loss(params: Tree, data: Tree) -> jax.Array:
        image = pix.adjust_contrast(pix.adjust_brightness(data["image"], 0.05), 0.9)
        small_image = image.reshape(batch, side, 2, side, 2, 3).mean(axis=(2, 4))
        return 1 - jnp.mean(pix.ssim(net.apply(params, small_image), image))

    def start() -> Tree:
        return net.init(jax.random.key(0), jnp.zeros((1, side, side, 3)))

    return trained(loss, start, {"image": 0.5 + _numbers(batch, 2 * side, 2 * side, 3) / 2})


def e3nn_network(*, small: bool) -> PackageStep:
    """Build tensor products of e3nn-jax between features of points and spherical harmonics, with its linear layers."""
    import e3nn_jax as e3nn  # noqa: PLC0415 # as above
    from e3nn_jax import flax as layers  # noqa: PLC0415 # as above
    from flax import linen  # noqa: PLC0415 # as above

    points, edges, copies = (16, 64, 4) if small else (2_048, 16_384, 64)

    class Net(linen.Module):
        """Messages between points, gated."""

        @linen.compact
        def __call__(self, places: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
            harmonics = e3nn.spherical_harmonics("0e + 1o", places[receivers] - places[senders], normalize=True)
            x = e3nn.IrrepsArray(f"{copies}x0e", jnp.ones((points, copies)) * places[:, :1])
            wanted = e3nn.Irreps(f"{2 * copies}x0e + {copies}x1o")
            for _ in range(2):
                sent = e3nn.tensor_product(x[senders], harmonics)
                met = e3nn.scatter_sum(layers.Linear(wanted)(sent), dst=receivers, output_size=points)
                x = e3nn.gate(met)
            return layers.Linear("0e")(x).array[:, 0]

    net = Net()
    batch = {
        "places": 2 * _numbers(points, 3),
        "senders": _tokens(edges, most=points),
        "receivers": _tokens(edges, most=points - 1),
        "target": _numbers(points),
    }

    def loss(params: Tree, data: Tree) -> jax.Array:
        found = net.apply(params, data["places"], data["senders"], data["receivers"])
        return jnp.mean((found - data["target"]) ** 2)

    def start() -> Tree:
        return net.init(jax.random.key(0), *(jnp.asarray(batch[name]) for name in ("places", "senders", "receivers")))

    return trained(loss, start, batch)


STEPS: Mapping[str, Callable[..., PackageStep]] = {
    factory.__name__: factory
    for factory in (
        transformers_gpt2,
        penzai_llama,
        equinox_esm2,
        jraph_network,
        e3x_messages,
        diffrax_ode,
        numpyro_vae,
        pix_upscaler,
        e3nn_network,
    )
}
"""Factories by name, each of which begins with its package."""
