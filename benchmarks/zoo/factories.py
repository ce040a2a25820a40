"""Factories of all programs of the zoo by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo.decoders import decode, decode_small, itx
from benchmarks.zoo.gemma import (
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
from benchmarks.zoo.graph_networks import graph_network, graph_network_8k, graph_network_small
from benchmarks.zoo.mixtures import mixtral, moe, moe_small
from benchmarks.zoo.programs import Program
from benchmarks.zoo.unets import unet, unet_3b, unet_small

FACTORIES: dict[str, Callable[[], Program]] = {
    factory.__name__: factory
    for factory in (
        gemma_2b,
        gemma_2b_4k,
        gemma_2b_8k,
        gemma_2b_16k,
        gemma_2b_32k,
        gemma_2b_scan,
        gemma_7b,
        gemma_small,
        gemma_small_scan,
        mixtral,
        moe,
        moe_small,
        graph_network,
        graph_network_8k,
        graph_network_small,
        unet,
        unet_3b,
        unet_small,
        decode,
        decode_small,
        itx,
    )
}
"""Factories of all programs by name."""
