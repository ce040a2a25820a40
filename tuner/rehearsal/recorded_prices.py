"""Times of recorded operators and collectives, by the kernel and link models of the cost model.

Products and attention are priced by their shapes, everything else by the bytes that it moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from costmodels.blocks.operator import Family, Operator, OpKind, Phase
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import collective_latency_s, collective_s, kernel_s
from costmodels.operators.layer_operators import Collective
from hardware.device import Device

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""PyTorch's products of matrices; the last two tensors are multiplied."""
MOVED = {
    "te.adam": 30.0,
    "te.l2norm": 4.0,
    "te.scale": 8.0,
    "te.rope": 4.0,
    "te.glu": 3.0,
    "te.quantize": 4.0,
    "te.dequantize": 3.0,
    "te.transpose": 2.0,
    "te.softmax_fwd": 4.0,
    "te.softmax_bwd": 6.0,
    "te.rmsnorm_fwd": 4.0,
    "te.rmsnorm_bwd": 6.0,
    "te.layernorm_fwd": 4.0,
    "te.layernorm_bwd": 6.0,
}
"""Bytes that a kernel moves for each element of its first tensor, in 16 bits. Adam reads a gradient and reads and
writes a weight and two moments in fp32 (28), and writes the weight in 16 bits. Quantizing writes the data and their
transpose."""
NOTHING = ("empty", "new_empty", "detach", "alias", "lift_fresh", "set_", "resize_", "scalar_tensor", "_unsafe_view")
"""Operators of PyTorch that run no kernel."""
_KINDS = (
    (("allgather", "all_gather"), OpKind.ALL_GATHER),
    (("reduce_scatter",), OpKind.REDUCE_SCATTER),
    (("allreduce", "all_reduce", "broadcast"), OpKind.ALL_REDUCE),
    (("alltoall", "all_to_all"), OpKind.ALL_TO_ALL),
    (("send", "recv"), OpKind.SEND_RECV),
)


def is_collective(kind: Sequence[Any]) -> bool:
    """Return whether a recorded kind is a collective."""
    return len(kind) == 4


class RecordedPrices:
    """Times of recorded kinds on a cluster, under a runtime's efficiencies.

    Args:
        setting: Job, cluster and runtime.
        config: Configuration that was rehearsed.
    """

    def __init__(self, setting: Setting, config: ParallelConfig) -> None:
        self.setting, self.has_ep = setting, config.ep > 1
        self.device: Device = setting.cluster.devices[0]
        self.operator_s = cache(self._operator_s)
        self.collective_s = cache(self._collective_s)

    def _operator_s(self, name: str, shapes: tuple[tuple[int, ...], ...], moved: int) -> float:
        """Return the time of an operator on the device [s]; 0 if it runs no kernel."""
        operator = operator_of(name, shapes, moved)
        if operator is None:
            return 0.0
        runtime = self.setting.runtime
        seconds = float(kernel_s(operator, self.device, self.setting.job, runtime)[0])
        uneven = 1.0 + runtime.expert_imbalance * (operator.kind is OpKind.GROUPED_MATMUL and self.has_ep)
        return seconds * uneven / runtime.speed_of(self.device.name)

    def _collective_s(self, name: str, size: int, ranks: tuple[int, ...], peer: int) -> tuple[float, float]:
        """Return the time of a collective alone on its links, and the part of it that is latency [s]."""
        kind = next((kind for words, kind in _KINDS if any(word in name for word in words)), None)
        if kind is None or len(ranks) < 2:
            return 0.0, 0.0
        members = np.array([ranks]) if peer < 0 else np.array([[min(peer, *ranks), max(peer, *ranks)]])
        efficiency = self.setting.runtime.network_efficiency
        stage = np.arange(self.setting.cluster.num_devices)
        if peer < 0:
            stride = ranks[1] - ranks[0]
            group = self.setting.cluster.group_links(np.array([stride]), np.array([len(ranks)]))
        else:
            group = self.setting.cluster.links_among([members], stage)
        collective = Collective(
            name=name, kind=kind, wire_bytes=np.array([size / efficiency]), network_efficiency=efficiency, group=group
        )
        return float(collective_s(collective)[0]), float(collective_latency_s(collective)[0])


def operator_of(name: str, shapes: tuple[tuple[int, ...], ...], moved: int) -> Operator | None:
    """Return a recorded operator as the kernel models take it; None if it runs no kernel.

    A grouped product is one of its products.
    """
    short = name.removeprefix("aten.").split(".")[0]
    if name.startswith("prim") or short in NOTHING or short.startswith(("empty", "new_empty")):
        return None
    if name.startswith(("te.gemm", "te.grouped_gemm", "te.attention", *PRODUCTS)):
        return _products_of(name, shapes, moved)
    elements = math.prod(shapes[0]) if shapes else 0
    if name in MOVED:
        kind = OpKind.NORM if "norm_" in name else OpKind.ELEMENTWISE
        return _operator(name, kind, (elements, 1), 0, MOVED[name] * elements)
    return _operator(name, OpKind.ELEMENTWISE, (elements,), 0, moved)


def _products_of(name: str, shapes: tuple[tuple[int, ...], ...], moved: int) -> Operator:
    """Return a product, one of a grouped product, or attention."""
    if name == "te.gemm":
        m, k, n = _product_of(*shapes)
        return _operator(name, OpKind.MATMUL, (m, k, n), 2 * m * k * n, 2 * (m * k + k * n + m * n))
    if name == "te.grouped_gemm":
        a, b, (is_a, is_b) = shapes
        n, k = (a[0], a[-1]) if is_a else (a[-1], math.prod(a[:-1]))
        m = b[-1] if is_b else math.prod(b[:-1])
        return _operator(name, OpKind.GROUPED_MATMUL, (1, m, k, n), 2 * m * k * n, 2 * (m * k + k * n + m * n))
    if name.startswith("te.attention"):
        backward = name.endswith("bwd")
        q, v, (batch, queries, keys, is_causal) = shapes
        heads, size = q[-2], (q[-1] + v[-1]) / 2
        flop = (5 if backward else 2) * 2 * batch * heads * queries * keys * size / (2 if is_causal else 1)
        elements = (2.5 if backward else 1) * (2 * math.prod(q) + 2 * math.prod(v))
        shape = (batch, heads, queries, keys, q[-1])
        return _operator(name, OpKind.ATTENTION, shape, flop, 2 * elements, is_forward=not backward)
    first, second = shapes[-2:]
    groups = first[0] if len(first) == 3 else 1
    m, k, n = first[-2], first[-1], second[-1]
    return _operator(name, OpKind.MATMUL, (groups * m, k, n), 2 * groups * m * k * n, moved)


def _product_of(a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> tuple[float, float, float]:
    """Return m, k and n of a product, the result of which has m rows and n columns."""
    m, n = out
    # each of the operands holds one of the outer dims and the inner one
    return m, math.sqrt(math.prod(a) * math.prod(b) / max(m * n, 1)), n


def _operator(
    name: str, kind: OpKind, shape: tuple[float, ...], flop: float, moved: float, *, is_forward: bool = True
) -> Operator:
    return Operator(
        name=name,
        kind=kind,
        block="",
        family=Family.MLP,
        phase=Phase.FORWARD if is_forward else Phase.BACKWARD,
        precision="bf16",
        shape=np.array([shape], dtype=np.float64),
        flop=np.array([flop], dtype=np.float64),
        moved_bytes=np.array([moved], dtype=np.float64),
    )
