"""Time of a matrix product alone on a device, from its output tiles, their waves, and memory traffic.

A GEMM library cuts the output [m, n] into tiles, gives one tile to one multiprocessor (SM) at a time, and runs along k
inside it (CUTLASS, "Efficient GEMM in CUDA"; NVIDIA's "Matrix Multiplication Background User's Guide" names the two
losses: tile quantisation, where m or n end inside a tile, and wave quantisation, where the last tiles leave SMs idle).
It picks the tile and a split of k by heuristics; this model assumes that it picks the fastest of TILES and SPLITS.

Letters: u unique shape rows, c tiles, p splits. The constants of a device are in catalog/kernels.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

TILES = np.array([(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)], dtype=np.float64)
"""Rows and columns of the tiles that libraries choose from [c, 2], largest first."""
SIZE_CLASS = np.array([0, 0, 1, 2, 2, 3])
"""Size class of each tile [c]."""
SPLITS = np.array([1.0, 2.0, 4.0, 8.0])
"""Parts into which k may be split [p]."""
PARTIAL_SUM_BYTES = 8
"""Bytes per output element and part of a split product, which writes and reads back an fp32 partial sum."""
SMOOTH_NUM_SMS = 128
"""Multiprocessors of a device whose number is unknown; waves of such a device are not quantised."""


class MatmulConstants(StrictModel):
    """Constants of one device for matrix products, fitted to measured ones or taken from a related device.

    Attributes:
        peak_share: Share of the device's peak that the largest tiles reach along an endless k.
        tile_shares: Speed of the tile classes against the class before: 128x128, 128x64, 64x64.
        ramp_k: Steps of k that take as long as the start and end of a tile.
        wave_share: Degree of quantisation of the last wave: 1 takes a whole wave, 0 only its share of the SMs.
        bandwidth_share: Share of the memory's peak bandwidth at which operands and results move.
        overlap_exponent: Exponent p in (compute^p + memory^p)^(1/p); infinite would be the roofline's maximum.
        latency_s: Time of an empty kernel [s].
        group_latency_s: Time that every further group of a grouped product adds [s].
        fp8_share: Ratio of the `peak_share` of fp8 products to that of bf16.
    """

    peak_share: Share
    tile_shares: Annotated[tuple[Share, Share, Share], Field(strict=False)]
    ramp_k: NotNegative
    wave_share: Annotated[float, Field(ge=0, le=1)]
    bandwidth_share: Share
    overlap_exponent: Annotated[float, Field(ge=1)]
    latency_s: NotNegative
    group_latency_s: NotNegative
    fp8_share: Share


def matmul_alone_s(
    constants: MatmulConstants,
    *,
    groups: FloatArray,
    m: FloatArray,
    k: FloatArray,
    n: FloatArray,
    moved_bytes: FloatArray,
    peak_flop_per_s: float,
    ramp_scale: float,
    bandwidth_bytes_per_s: float,
    num_sms: int | None,
) -> FloatArray:
    """Return the time of `groups` products [m, k] @ [k, n], as one kernel or one stream of kernels [s], [u].

    Args:
        constants: Constants of the device for matrix products.
        groups: Number of equal products that share the device's waves [u]; 1 for a plain product.
        m: Rows of each product [u].
        k: Length of the sums of each product [u].
        n: Columns of each product [u].
        moved_bytes: Bytes of operands and results of all groups [u].
        peak_flop_per_s: Peak of the device in the product's precision [FLOP/s].
        ramp_scale: Ratio of that peak to the bf16 peak; start and end of a tile take as long in any precision.
        bandwidth_bytes_per_s: Peak bandwidth of the device memory [bytes/s].
        num_sms: Number of multiprocessors; None where unknown.
    """
    class_share = np.cumprod((constants.peak_share, *constants.tile_shares))
    tile_s = 2 * TILES.prod(axis=1) / (peak_flop_per_s * class_share[SIZE_CLASS])
    units = num_sms or SMOOTH_NUM_SMS
    wave_share = constants.wave_share if num_sms else 0.0
    # number of waves [u, c, p]: at least one, and quantised as far as wave_share says
    tiles = groups[:, None] * np.ceil(m[:, None] / TILES[:, 0]) * np.ceil(n[:, None] / TILES[:, 1])
    waves = tiles[:, :, None] * (SPLITS / units)
    waves = (1 - wave_share) * np.maximum(waves, 1.0) + wave_share * np.ceil(waves)
    steps = k[:, None] / SPLITS + constants.ramp_k * ramp_scale
    # all tiles of one split move the same bytes, so the one that computes fastest is the fastest
    compute_s = units * steps * (waves * tile_s[:, None]).min(axis=1)
    bandwidth = bandwidth_bytes_per_s * constants.bandwidth_share
    memory_s = (moved_bytes / bandwidth)[:, None]
    # smooth maximum of compute and memory, divided by the slower one so that powers stay finite
    slower = np.maximum(compute_s, memory_s)
    exponent = constants.overlap_exponent
    together_s = slower * (1 + (np.minimum(compute_s, memory_s) / slower) ** exponent) ** (1 / exponent)
    partial_bytes = PARTIAL_SUM_BYTES * SPLITS * (groups * m * n)[:, None]
    partial_s = np.where(SPLITS > 1, partial_bytes / bandwidth + constants.latency_s, 0.0)
    fastest_s = (together_s + partial_s).min(axis=1)
    return np.asarray(fastest_s + constants.latency_s + (groups - 1) * constants.group_latency_s)
