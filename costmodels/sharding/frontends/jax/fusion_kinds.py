"""Kinds of fusion of jaxpr primitives, as XLA fuses them on GPUs.

Sources: the fusible instructions of XLA (openxla/xla, `xla/service/gpu/gpu_fusible.cc`), and its layout assignment,
which makes most transpositions ways of reading.
"""

from __future__ import annotations

from costmodels.sharding.frontends.jax.rules import ELEMENTWISE
from costmodels.sharding.graph import STACK, UNSTACK, FusionKind

VIEWS = "copy device_put expand_dims name optimization_barrier reshape squeeze stop_gradient transpose"
LOOPS = "bitcast_convert_type broadcast_in_dim concatenate pad random_bits rev stack tile"
PICKS = "dynamic_slice gather slice split unstack"
PUTS = "dynamic_update_slice scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"
SUMS = "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"

KINDS = {
    **dict.fromkeys(ELEMENTWISE, FusionKind.LOOP),
    **dict.fromkeys(LOOPS.split(), FusionKind.LOOP),
    **dict.fromkeys(VIEWS.split(), FusionKind.VIEW),
    **dict.fromkeys(PICKS.split(), FusionKind.PICK),
    **dict.fromkeys(PUTS.split(), FusionKind.PUT),
    **dict.fromkeys(SUMS.split(), FusionKind.SUM),
    STACK: FusionKind.STACK,
    UNSTACK: FusionKind.PICK,
}
"""Kinds of the primitives that are fused; all others read and write memory by themselves."""
