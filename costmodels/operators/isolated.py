"""Isolated operators and collectives, outside any training step, as a micro-benchmark of a device measures them.

t_hat is the time of an isolated operator on arbitrary data (FlexParallel 3.1). Kind, phase, role and shape determine
it, so that measured times of one model's shapes can be compared with the formula without that model: flop and bytes
follow from the shape, and an elementwise operator is assumed to run in the eager kernels of a framework that fuses
nothing. Where the shape leaves something open, the usual benchmark decides: as many key heads as query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.blocks.builder import UNFUSED_PASSES
from costmodels.blocks.operator import COLLECTIVES, Family, Operator, OpKind, Phase
from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import NARROW_BYTES
from costmodels.operators.kernels import alone_s, collective_alone_s
from hardware.cluster import Cluster

PASSES: dict[str, tuple[float, float]] = {
    "swiglu": (3 * UNFUSED_PASSES, 5 * UNFUSED_PASSES),
    "gelu": (2 * UNFUSED_PASSES, 3 * UNFUSED_PASSES),
    "rotary": (2 * UNFUSED_PASSES, 2 * UNFUSED_PASSES),
    "residual": (3 * UNFUSED_PASSES, 3 * UNFUSED_PASSES),
    "cross_entropy": (17, 8),
}
"""Memory passes of an elementwise operator, forward and backward, as `layer_operators.step_operators` counts them for a
runtime that fuses nothing."""

NORM_PASSES = (2.0, 3.0)
ATTENTION_WORK = (1.0, 2.5)
"""Flop and bytes of each phase over those of the forward phase; see layer_operators.py."""

_PRODUCTS = ("data_gradient", "weight_gradient")
_NORMS = {"rms": "rms_norm", "layer": "layer_norm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolatedCall:
    """One isolated operator or collective.

    Attributes:
        kind: Kind of operator, which selects the kernel model.
        phase: Phase, forward or backward; forward for a collective.
        role: Name that distinguishes kernels of one kind: the product of a layer, the norm, the elementwise operator.
            Empty for a collective.
        precision: Type of the elements.
        shape: Sizes in the order of `layer_operators.Operator.shape` or `layer_operators.Collective.shape`.
    """

    kind: OpKind
    phase: Phase
    role: str
    precision: str
    shape: tuple[float, ...]

    @property
    def is_collective(self) -> bool:
        """Whether the call is a collective of several ranks."""
        return self.kind in COLLECTIVES

    @property
    def group_size(self) -> int:
        """Number of ranks that take part."""
        return int(self.shape[1]) if self.is_collective else 1


def isolated_role(name: str, kind: OpKind, model: ModelSpec) -> str | None:
    """Return the role of the operator of that name in isolation; None where its shape doesn't determine the time.

    The shape is not enough for unfused attention's products, whose batch is in no shape, and for operators that move
    rows about: the embedding, the experts' permutation, casts.
    """
    if kind in COLLECTIVES:
        return ""
    if kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL):
        suffix = name.rpartition(".")[2]
        return None if name.startswith("attention.core") else suffix if suffix in _PRODUCTS else "forward"
    if kind is OpKind.SCAN:
        return None
    if kind is OpKind.ATTENTION:
        return "causal"
    if kind is OpKind.NORM:
        return _NORMS[model.norm]
    role = name.removesuffix(".gradient").rpartition(".")[2]
    role = ("swiglu" if model.gated_ffn else "gelu") if role == "activation" else role
    return role if role in PASSES else None


def is_run_by(call: IsolatedCall, model: ModelSpec) -> bool:
    """Check whether the model runs the call's kernel: its own activation and norm, and all other kinds."""
    unlike = {"gelu" if model.gated_ffn else "swiglu", *(norm for name, norm in _NORMS.items() if name != model.norm)}
    return call.role not in unlike


def operator_role(call: IsolatedCall) -> str:
    """Return the last part of the name of an operator that has the role of a call."""
    return "activation" if call.role in ("swiglu", "gelu") else call.role


def isolated_operator(call: IsolatedCall) -> Operator:
    """Return the call as an operator with one shape [1]."""
    element_bytes = 4.0 if call.precision in ("fp32", "tf32") else 2.0
    assert call.precision not in NARROW_BYTES, "a benchmark of isolated operators has no narrow products"
    flop, elements = _count_work(call)
    return Operator(
        name=call.role,
        kind=call.kind,
        block="",
        family=Family.MLP,
        phase=call.phase,
        precision=call.precision,
        shape=np.array([call.shape]),
        flop=np.array([flop]),
        moved_bytes=np.array([element_bytes * elements]),
    )


def isolated_call_s(call: IsolatedCall, cluster: Cluster) -> float | None:
    """Return t_hat of the call on the cluster's first kind of device [s]; None where it has no such group of ranks."""
    if not call.is_collective:
        return float(alone_s(isolated_operator(call), cluster.devices[0])[0])
    # a micro-benchmark runs on neighbouring ranks of one domain
    message_bytes, size, hosts = call.shape
    if cluster.num_devices % int(size) or hosts != 1 or size > cluster.devices_per_domain:
        return None
    group = cluster.group_links(np.array([1]), np.array([int(size)]))
    return float(collective_alone_s(call.kind, np.array([message_bytes]), group)[0])


def _count_work(call: IsolatedCall) -> tuple[float, float]:
    """Return the flop of a call, and the elements that it moves."""
    is_backward = call.phase is Phase.BACKWARD
    match call.kind:
        case OpKind.MATMUL:
            m, k, n = call.shape
            return 2 * m * k * n, m * k + k * n + m * n
        case OpKind.GROUPED_MATMUL:
            groups, m, k, n = call.shape
            if call.role == "weight_gradient":  # the sum runs over the rows of all groups
                return 2 * m * k * n, m * k + k * n + groups * m * n
            return 2 * m * k * n, m * k + groups * k * n + m * n
        case OpKind.ATTENTION:
            batch, heads, queries, keys, size = call.shape
            times = ATTENTION_WORK[is_backward]
            return times * 2 * batch * heads * queries * keys * size, times * 4 * batch * heads * queries * size
        case OpKind.NORM:
            rows, columns = call.shape
            return 0.0, NORM_PASSES[is_backward] * rows * columns
        case OpKind.ELEMENTWISE:
            (elements,) = call.shape
            return 0.0, PASSES[call.role][is_backward] * elements
    raise AssertionError(f"{call.kind} is no operator")
