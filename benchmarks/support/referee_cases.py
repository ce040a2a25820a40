"""Programs that the referee judges: those of the zoo, the same at medium sizes, and their plans.

The zoo's small programs are so small that plans cut little except the optimizer's update. The medium programs here have
the same primitives at the smallest sizes at which the planners cut products too, and at which masks and scalars, which
XLA shards as it likes, are a small part of the bytes sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.zoo import FACTORIES, GEMMA_2B, Decoder, Gemma, GraphNetwork, Mixture, Program, UNet
from costmodels.sharding.device_mesh import DeviceMesh, mesh_of
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.plan import Plan
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError, did_you_mean
from tuner.planners.planning import PLANNERS, PlannerOptions, plan_graph

__all__ = ["DEFAULT_MODELS", "MODELS", "PLANNERS", "mesh_of_text", "plan_of", "program_of", "widened"]

BASE = Gemma(layers=2, model=128, heads=8, head=32, hidden=512, vocabulary=1024, batch=32, tokens=128)


def gemma_medium() -> Program:
    """Build two layers of a dense transformer."""
    return BASE.train_program()


def gemma_medium_scan() -> Program:
    """Build three layers of a dense transformer as a loop."""
    return replace(BASE, layers=3, is_scanned=True).train_program()


def moe_medium() -> Program:
    """Build two layers of eight experts."""
    return Mixture(base=BASE, experts=8, capacity=32).train_program()


def graph_network_medium() -> Program:
    """Build two steps of message passing."""
    return GraphNetwork(
        nodes=1024, edges=16_384, features=64, latent=512, hidden=512, hidden_layers=2, steps=2
    ).train_program()


def unet_medium() -> Program:
    """Build two levels of one block each on images of 32 by 32."""
    return UNet(batch=32, side=32, channels=(64, 128), blocks=1, groups=8, heads=8).train_program()


def decode_medium() -> Program:
    """Build a decoding step of two layers of Gemma 2B's sizes with a small vocabulary."""
    base = replace(GEMMA_2B, layers=2, vocabulary=32_768, batch=64, tokens=1)
    return Decoder(base=base, cached=512).program()


MEDIUM: Mapping[str, Callable[[], Program]] = {
    factory.__name__: factory
    for factory in (gemma_medium, gemma_medium_scan, moe_medium, graph_network_medium, unet_medium, decode_medium)
}
MODELS: Mapping[str, Callable[[], Program]] = {**FACTORIES, **MEDIUM}
"""Factories of all programs by name."""

DEFAULT_MODELS = (*(name for name in FACTORIES if "small" in name), *MEDIUM)
"""Programs that compile quickly and whose numbers are compared: all except the zoo's full sizes."""


def program_of(name: str) -> Program:
    """Build a program by its name; programs whose numbers are compared are in float32 throughout.

    Raises:
        ConfigError: There is no program of that name.
    """
    if name not in MODELS:
        raise ConfigError(
            "must be a program of the zoo", key="--model", value=name, nearest=did_you_mean(name, list(MODELS))
        )
    function, arguments, donated = MODELS[name]()
    return (function, jax.tree.map(widened, arguments) if name in DEFAULT_MODELS else arguments, donated)


def widened(leaf: Any) -> Any:
    """Return the leaf with float32 in place of bfloat16, so that another order of additions changes little."""
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype)


def mesh_of_text(text: str) -> DeviceMesh:
    """Build a mesh on DGX A100 from its axes."""
    return mesh_of(text, find_cluster("dgx-a100"))


def plan_of(program: Program, mesh: DeviceMesh, planner: str) -> Plan:
    """Plan a program with a planner on whole axes, as in a framework's mesh."""
    function, arguments, donated = program
    graph = graph_of_jax(function, *arguments, donated=donated)
    return plan_graph(graph, mesh, PlannerOptions(planner=planner, whole_axes=True)).plan  # type: ignore[arg-type] # main checks it
