"""Training step of a network that passes messages along the edges of a graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.zoo.programs import Program, Tree, shape_of, train_program


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
        """Return the shapes of all parameters."""
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
        """Return the shapes of a perceptron's parameters."""
        sizes = [into, *[self.hidden] * self.hidden_layers, out]
        return {
            str(number): {"weight": shape_of(*pair, dtype=jnp.float32), "bias": shape_of(pair[1], dtype=jnp.float32)}
            for number, pair in enumerate(itertools.pairwise(sizes))
        }

    def loss(self, params: Tree, batch: Tree) -> Array:
        """Compute the squared error of the nodes' new features."""
        nodes = perceptron(params["encoder"], batch["nodes"])
        edges = perceptron(params["edge_encoder"], batch["edges"])
        for name, step in params["steps"].items():
            with jax.named_scope(f"steps.{name}"):
                # Each edge sees the states of both its ends (gathers), and each step adds residuals.
                ends = [nodes[batch["senders"]], nodes[batch["receivers"]]]
                edges = edges + perceptron(step["edge"], jnp.concatenate([edges, *ends], axis=-1))
                # Each node sums the messages of its incoming edges.
                heard = jax.ops.segment_sum(edges, batch["receivers"], num_segments=self.nodes)
                nodes = nodes + perceptron(step["node"], jnp.concatenate([nodes, heard], axis=-1))
        return jnp.mean(jnp.square(perceptron(params["decoder"], nodes) - batch["targets"]))

    def train_program(self) -> Program:
        """Build one training step."""
        nodes = shape_of(self.nodes, self.features, dtype=jnp.float32)
        ends = shape_of(self.edges, dtype=jnp.int32)
        edges = shape_of(self.edges, self.features, dtype=jnp.float32)
        batch = {"nodes": nodes, "edges": edges, "senders": ends, "receivers": ends, "targets": nodes}
        return train_program(self.loss, self.params(), batch)


def perceptron(layers: Tree, x: Array) -> Array:
    """Apply linear layers with rectifiers between them."""
    for number, layer in enumerate(layers.values()):
        x = (x if number == 0 else jax.nn.relu(x)) @ layer["weight"] + layer["bias"]
    return x


GNS = GraphNetwork(nodes=2048, edges=65_536, features=128, latent=2048, hidden=1024, hidden_layers=3, steps=24)
"""Sizes that TOAST, section 5.1, lists for its simulator of physical systems, with the edges of its largest graphs.

They give 466 M parameters, while the paper states 875 M.
"""


def graph_network() -> Program:
    """Build 24 steps of messages with perceptrons of three layers of 1,024."""
    return GNS.train_program()


def graph_network_8k() -> Program:
    """Build 24 steps of messages with 8,192 edges, as in the paper's smallest graphs."""
    return replace(GNS, edges=8192).train_program()


def graph_network_small() -> Program:
    """Build two small steps."""
    return GraphNetwork(nodes=10, edges=12, features=6, latent=8, hidden=14, hidden_layers=1, steps=2).train_program()
