"""Read the measured operators of configs/measured/ops, with the cost model's predictions of each.

Letters: s measurements, d sizes of a shape.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from costmodels.blocks.operator import COLLECTIVES, Family, Operator, OpKind, Phase
from costmodels.operators.kernels import alone_s, collective_s
from costmodels.operators.layer_operators import Collective
from hardware.arrays import FloatArray
from hardware.cluster_file import cluster_from_mapping
from hardware.device import find_device
from hardware.group_links import GroupLinks

OPERATORS = Path(__file__).parents[2] / "configs" / "measured" / "ops"
FILES = ("kernels.csv", "collectives.csv")

ELEMENT_BYTES = 2.0
PASSES = {"gelu": (2.0, 3.0), "residual": (3.0, 3.0), "gated_activation": (3.0, 5.0)}
"""Memory passes of elementwise operators, forward and backward; see `costmodels.operators.layer_operators`."""

NORMS = ("layer_norm", "rms_norm")
"""Roles of one kind that stay apart, since a model has only one of them."""

UNLISTED = "unlisted"
"""Name of no device: its kernels are predicted as those of a device without measurements."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredOperators:
    """Operators of one kind and phase, measured by one source on one device.

    Attributes:
        source: Name of the source of the measurements.
        device: Name of the measured device.
        kind: Kind of the operators.
        phase: Phase of the operators, forward or backward.
        shape: Sizes of the operators [s, d].
        measured_s: Measured times [s].
        predicted_s: Times predicted by the cost model [s].
        unlisted_s: Times predicted for a device of these peaks without measured kernels [s].
    """

    source: str
    device: str
    kind: OpKind
    phase: Phase
    shape: FloatArray
    measured_s: FloatArray
    predicted_s: FloatArray
    unlisted_s: FloatArray


def read_operators(folder: Path = OPERATORS) -> list[MeasuredOperators]:
    """Read all operators of the folder's files."""
    parts: dict[tuple[str, ...], list[MeasuredOperators]] = {}
    for (source, device, precision, kind, phase, role), rows in _by_role(folder).items():
        shape = np.array([[float(size) for size in row["shape"].split()] for row in rows])
        measured = MeasuredOperators(
            source=source,
            device=device,
            kind=OpKind(kind),
            phase=Phase(phase),
            shape=shape,
            measured_s=np.array([float(row["time_us"]) for row in rows]) * 1e-6,
            predicted_s=_predicted_s(device, precision, OpKind(kind), Phase(phase), role, shape),
            unlisted_s=_predicted_s(device, precision, OpKind(kind), Phase(phase), role, shape, as_unlisted=True),
        )
        # A surrogate learns per kind and phase; the two norms stay apart, since a model has only one of them.
        parts.setdefault((source, device, kind, phase, role if role in NORMS else ""), []).append(measured)
    return [_join(each) for each in parts.values()]


def _by_role(folder: Path) -> dict[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in _rows(folder):
        key = tuple(row[name] for name in ("source", "device", "precision", "kind", "phase", "role"))
        found.setdefault(key, []).append(row)
    return found


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    for name in FILES:
        with (folder / name).open(encoding="utf-8", newline="") as lines:
            yield from csv.DictReader(lines)


def _join(parts: Sequence[MeasuredOperators]) -> MeasuredOperators:
    """Join roles of one kind, as a trial sees them."""
    return replace(
        parts[0],
        shape=np.concatenate([part.shape for part in parts]),
        measured_s=np.concatenate([part.measured_s for part in parts]),
        predicted_s=np.concatenate([part.predicted_s for part in parts]),
        unlisted_s=np.concatenate([part.unlisted_s for part in parts]),
    )


def _predicted_s(
    device: str, precision: str, kind: OpKind, phase: Phase, role: str, shape: FloatArray, *, as_unlisted: bool = False
) -> FloatArray:
    """Predict times of isolated operators, outside of any training step [s]."""
    if kind in COLLECTIVES:
        return np.array([_collective_s(device, kind, *sizes) for sizes in shape.tolist()])
    where = find_device(device)
    return alone_s(
        _operator(kind, phase, role, shape, precision), replace(where, name=UNLISTED) if as_unlisted else where
    )


def _collective_s(device: str, kind: OpKind, message_bytes: float, size: float, hosts: float) -> float:
    """Predict the time of one collective of all devices of some hosts [s]."""
    collective = Collective(
        name=kind,
        kind=kind,
        wire_bytes=np.array([message_bytes]),
        network_efficiency=1.0,
        group=_group(device, int(size), int(hosts)),
    )
    return float(collective_s(collective)[0])


@cache
def _group(device: str, size: int, hosts: int) -> GroupLinks:
    mapping = {"device": device, "hosts": hosts, "devices_per_host": size // hosts}
    return cluster_from_mapping(mapping, Path()).group_links(np.array([1]), np.array([size]))


def _operator(kind: OpKind, phase: Phase, role: str, shape: FloatArray, precision: str) -> Operator:
    """Build the operator as `costmodels.operators.layer_operators` would."""
    # Operations and bytes follow the same conventions as in a layer; backward attention has 2.5 times the products.
    is_forward = phase == Phase.FORWARD
    columns = shape.T
    flop = np.zeros(len(shape))
    if kind == OpKind.MATMUL:
        m, k, n = columns
        flop, elements = 2 * m * k * n, m * k + k * n + m * n
    elif kind == OpKind.GROUPED_MATMUL:
        groups, m, k, n = columns
        # The gradient of the weights writes one matrix per group; forward and input gradient read one per group.
        weights = m * n if role == "weight_gradient" else k * n
        others = m * k + k * n if role == "weight_gradient" else m * k + m * n
        flop, elements = 2 * m * k * n, groups * weights + others
    elif kind == OpKind.ATTENTION:
        batch, heads, queries, keys, size = columns
        value_size = np.full_like(size, float(role.removeprefix("value"))) if role else size
        products = 1.0 if is_forward else 2.5
        flop = products * batch * heads * queries * keys * (size + value_size)
        elements = products * 2 * batch * heads * queries * (size + value_size)
    elif kind == OpKind.NORM:
        elements = (2.0 if is_forward else 3.0) * columns[0] * columns[1]
    else:
        elements = PASSES[role][0 if is_forward else 1] * columns[0]
    return Operator(
        name=f"measured.{role}",
        kind=kind,
        block="dense_mlp",
        family=Family.MLP,
        phase=phase,
        precision=precision,
        shape=shape,
        flop=flop,
        moved_bytes=ELEMENT_BYTES * elements,
    )
