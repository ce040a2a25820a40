"""Time of a matrix product alone on a device: output tiles, waves of tiles over the multiprocessors, memory traffic.

A GEMM library cuts the output [m, n] into tiles, gives one tile to one multiprocessor (SM) at a time, and runs along k
inside it (CUTLASS, "Efficient GEMM in CUDA"; NVIDIA's "Matrix Multiplication Background User's Guide" names the two
losses: tile quantisation, where m or n end inside a tile, and wave quantisation, where the last tiles leave SMs idle).
It picks the tile and a split of k by heuristics; here the fastest of TILES and SPLITS is taken to be its pick.

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
"""Rows and columns of the tiles that libraries choose from [c, 2], the largest first."""
SIZE_CLASS = np.array([0, 0, 1, 2, 2, 3])
"""Class of size of each tile [c]."""
SPLITS = np.array([1.0, 2.0, 4.0, 8.0])
"""Parts into which k may be split [p]."""
PARTIAL_SUM_BYTES = 8
"""A split product writes and reads back one fp32 partial sum per output element and part."""
SMOOTH_NUM_SMS = 128
"""Multiprocessors of a device of which the catalog knows no number; such a device quantises no waves."""


class MatmulConstants(StrictModel):
    """What one device does with matrix products; fitted to measured ones, or taken from a relative.

    Attributes:
        peak_share: Share of the device's peak that the largest tiles reach along an endless k.
        tile_shares: Speed of the tile classes against the class before: 128x128, 128x64, 64x64.
        ramp_k: Steps of k that the start and end of a tile take as long as.
        wave_share: How far the last wave is quantised: 1 takes a whole wave, 0 only its share of the SMs.
        bandwidth_share: Share of the memory's peak bandwidth that operands and results move with.
        overlap_exponent: p in (compute^p + memory^p)^(1/p); infinite would be the roofline's maximum.
        latency_s: Time of an empty kernel [s].
        group_latency_s: What every further group of a grouped product adds [s].
        fp8_share: `peak_share` of fp8 products over that of bf16.
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
    """Time of `groups` products [m, k] @ [k, n], one kernel or one stream of kernels [u].

    Args:
        constants: What the device does with matrix products.
        groups: Number of equal products that share the device's waves [u]; 1 for a plain product.
        m: Rows of each product [u].
        k: Length of its sums [u].
        n: Its columns [u].
        moved_bytes: Bytes of operands and results of all groups [u].
        peak_flop_per_s: The device's peak in the product's precision.
        ramp_scale: That peak over the bf16 peak: start and end of a tile take as long in any precision.
        bandwidth_bytes_per_s: The device memory's peak.
        num_sms: Multiprocessors; None where unknown.
    """
    class_share = np.cumprod((constants.peak_share, *constants.tile_shares))
    tile_s = 2 * TILES.prod(axis=1) / (peak_flop_per_s * class_share[SIZE_CLASS])
    units = num_sms or SMOOTH_NUM_SMS
    wave_share = constants.wave_share if num_sms else 0.0
    tiles = groups[:, None] * np.ceil(m[:, None] / TILES[:, 0]) * np.ceil(n[:, None] / TILES[:, 1])
    waves = tiles[:, :, None] * (SPLITS / units)
    waves = (1 - wave_share) * np.maximum(waves, 1.0) + wave_share * np.ceil(waves)
    steps = k[:, None] / SPLITS + constants.ramp_k * ramp_scale
    # all tiles of one split move the same bytes, so the one that computes fastest is the fastest
    compute_s = units * steps * (waves * tile_s[:, None]).min(axis=1)
    bandwidth = bandwidth_bytes_per_s * constants.bandwidth_share
    memory_s = (moved_bytes / bandwidth)[:, None]
    slower = np.maximum(compute_s, memory_s)
    exponent = constants.overlap_exponent
    together_s = slower * (1 + (np.minimum(compute_s, memory_s) / slower) ** exponent) ** (1 / exponent)
    partial_bytes = PARTIAL_SUM_BYTES * SPLITS * (groups * m * n)[:, None]
    partial_s = np.where(SPLITS > 1, partial_bytes / bandwidth + constants.latency_s, 0.0)
    fastest_s = (together_s + partial_s).min(axis=1)
    return np.asarray(fastest_s + constants.latency_s + (groups - 1) * constants.group_latency_s)
