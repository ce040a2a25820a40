"""Time of flash attention alone on a device, with the effects of short sequences and of the causal mask.

One thread block holds some rows of queries and runs along all keys before them (Dao 2023, FlashAttention-2, section
3.2), so under a causal mask the blocks differ in length by up to the whole key length. However well they are
scheduled, the last ones run on while other multiprocessors are idle: list scheduling ends at most one longest block
after an even split (Graham 1969), and the measured tail is a fitted share of that block.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from costmodels.operators.matmul import SMOOTH_NUM_SMS, NotNegative, Positive, Share
from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel

HEAD_SIZES = (64.0, 128.0, 256.0)


class AttentionConstants(StrictModel):
    """Constants of one device for one pass of flash attention.

    Attributes:
        peak_share: Share of the 16-bit peak at head size 128, endless sequence and many heads.
        head_shares: Speed at the HEAD_SIZES 64, 128 and 256 over that at 128; between them by the logarithm of the
            size.
        ramp_tokens: Tokens of sequence whose work takes as long as each row's start and end.
        tail_rows: Rows of queries, against all keys, that run after most multiprocessors are done.
        latency_s: Time of an empty kernel [s].
    """

    peak_share: Share
    head_shares: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)]
    ramp_tokens: NotNegative
    tail_rows: NotNegative
    latency_s: NotNegative


def attention_alone_s(
    constants: AttentionConstants,
    *,
    batch: FloatArray,
    heads: FloatArray,
    queries: FloatArray,
    head_size: FloatArray,
    flop: FloatArray,
    moved_bytes: FloatArray,
    peak_flop_per_s: float,
    bandwidth_bytes_per_s: float,
    num_sms: int | None,
) -> FloatArray:
    """Return the time of one pass of causal flash attention [s], [u].

    Args:
        constants: Constants of the device for this pass.
        batch: Number of sequences [u].
        heads: Number of query heads [u].
        queries: Rows of queries per sequence [u]; with ring attention those of one rank, whose kernels run one after
            another over as many keys each.
        head_size: Elements of one query head [u].
        flop: Floating-point operations under the mask [u].
        moved_bytes: Bytes of queries, keys, values and results [u].
        peak_flop_per_s: Peak of the device in 16 bits [FLOP/s].
        bandwidth_bytes_per_s: Peak bandwidth of the device memory [bytes/s].
        num_sms: Number of multiprocessors; None where unknown.
    """
    share = np.interp(np.log2(head_size), np.log2(HEAD_SIZES), constants.head_shares)
    # heads below the smallest measured size are taken to be slower in proportion
    narrow = np.minimum(head_size / HEAD_SIZES[0], 1.0)
    rate = peak_flop_per_s * constants.peak_share * share * narrow
    # a row of queries averages half of the keys, the last ones see all
    last_row_flop = 2 * flop / (batch * heads * queries)
    tail_s = constants.tail_rows * last_row_flop * (num_sms or SMOOTH_NUM_SMS) / rate
    compute_s = flop * (1 + constants.ramp_tokens / queries) / rate + tail_s
    return np.asarray(constants.latency_s + np.maximum(compute_s, moved_bytes / bandwidth_bytes_per_s))
