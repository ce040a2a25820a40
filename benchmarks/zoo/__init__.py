"""Programs in JAX whose graphs planners shard: training steps and a decoding step, at full size and small.

A factory takes no arguments and returns (function, abstract arguments, names of the donated arguments). Nothing is
allocated. FACTORIES names all factories. The full sizes follow published models if the name says so. The small programs
have every primitive of the large ones, in dims that two devices can halve.
"""

from benchmarks.zoo.decoders import ITX, Decoder, decode, decode_small, itx
from benchmarks.zoo.factories import FACTORIES
from benchmarks.zoo.gemma import (
    GEMMA_2B,
    GEMMA_7B,
    SMALL_GEMMA,
    Gemma,
    gemma_2b,
    gemma_2b_4k,
    gemma_2b_8k,
    gemma_2b_16k,
    gemma_2b_32k,
    gemma_2b_scan,
    gemma_7b,
    gemma_small,
    gemma_small_scan,
)
from benchmarks.zoo.graph_networks import GNS, GraphNetwork, graph_network, graph_network_8k, graph_network_small
from benchmarks.zoo.mixtures import MIXTRAL, Mixture, mixtral, moe, moe_small
from benchmarks.zoo.programs import Program, shape_of
from benchmarks.zoo.unets import UNet, unet, unet_3b, unet_small

__all__ = [
    "FACTORIES",
    "GEMMA_2B",
    "GEMMA_7B",
    "GNS",
    "ITX",
    "MIXTRAL",
    "SMALL_GEMMA",
    "Decoder",
    "Gemma",
    "GraphNetwork",
    "Mixture",
    "Program",
    "UNet",
    "decode",
    "decode_small",
    "gemma_2b",
    "gemma_2b_4k",
    "gemma_2b_8k",
    "gemma_2b_16k",
    "gemma_2b_32k",
    "gemma_2b_scan",
    "gemma_7b",
    "gemma_small",
    "gemma_small_scan",
    "graph_network",
    "graph_network_8k",
    "graph_network_small",
    "itx",
    "mixtral",
    "moe",
    "moe_small",
    "shape_of",
    "unet",
    "unet_3b",
    "unet_small",
]
