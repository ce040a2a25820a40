"""The constants of kernels by device, and tables of measured matrix products that correct them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from costmodels.operators.attention import AttentionConstants
from costmodels.operators.matmul import MatmulConstants, NotNegative, Share
from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel, checked, read_mapping

DEFAULT = "default"


class MemoryConstants(StrictModel):
    """What one device does with operators that only move memory.

    Attributes:
        elementwise_share: Share of the memory's peak bandwidth that elementwise operators reach.
        norm_share: The same for norms, which go over their rows twice.
        latency_s: Time of an empty kernel [s].
    """

    elementwise_share: Share
    norm_share: Share
    latency_s: NotNegative


class KernelConstants(StrictModel):
    """What one device does with all kinds of kernels.

    Attributes:
        matmul: Matrix products, plain and grouped.
        attention_forward: Flash attention, forward.
        attention_backward: Flash attention, backward.
        memory: Operators that only move memory.
        table: Name of the table of measured products that corrects `matmul`; None where there is none.
    """

    matmul: MatmulConstants
    attention_forward: AttentionConstants
    attention_backward: AttentionConstants
    memory: MemoryConstants
    table: str | None = None


class _Entry(StrictModel):
    """A device of the catalog file: what it does not say itself is as in the entry that `like` names."""

    like: str | None = None
    fitted_to: str | None = None
    matmul: MatmulConstants | None = None
    attention_forward: AttentionConstants | None = None
    attention_backward: AttentionConstants | None = None
    memory: MemoryConstants | None = None
    table: str | None = None


class _File(StrictModel):
    sources: dict[str, str]
    devices: dict[str, _Entry]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatmulTable:
    """Measured products of one device: by how much each took longer than the formula says.

    Attributes:
        log2_m: log2 of the grid's rows [a].
        log2_n: log2 of its columns [b].
        log2_k: log2 of its sums' lengths [c].
        log_ratio: Logarithm of measured over computed time [a, b, c].
    """

    log2_m: FloatArray
    log2_n: FloatArray
    log2_k: FloatArray
    log_ratio: FloatArray

    def correction(self, m: FloatArray, k: FloatArray, n: FloatArray) -> FloatArray:
        """Factor on the computed time [u]: trilinear in the logarithms, halved with each doubling beyond the grid."""
        low, weight, beyond = zip(
            *(_place(np.log2(size), grid) for size, grid in ((m, self.log2_m), (n, self.log2_n), (k, self.log2_k))),
            strict=True,
        )
        value = np.zeros(m.shape)
        for a in (0, 1):
            for b in (0, 1):
                for c in (0, 1):
                    corner = self.log_ratio[low[0] + a, low[1] + b, low[2] + c]
                    value += corner * _side(weight[0], a) * _side(weight[1], b) * _side(weight[2], c)
        return np.asarray(np.exp(value * 0.5 ** (beyond[0] + beyond[1] + beyond[2])))


def kernel_constants(device_name: str) -> KernelConstants:
    """The constants of the device of that catalog name; those of no device in particular where it has none."""
    return _constants().get(device_name) or _constants()[DEFAULT]


@cache
def matmul_table(name: str) -> MatmulTable:
    """The table in catalog/kernels/NAME.csv: rows m, n, then the logarithm of the ratio in percent for each k."""
    with _folder().joinpath(f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        header, *rows = csv.reader(lines)
    values = np.array(rows, dtype=np.float64)
    m, n = np.unique(values[:, 0]), np.unique(values[:, 1])
    k = np.array([float(column.removeprefix("k")) for column in header[2:]])
    assert len(values) == len(m) * len(n), f"{name}.csv must have one row for every m and n"
    order = np.lexsort((values[:, 1], values[:, 0]))
    return MatmulTable(
        log2_m=np.log2(m),
        log2_n=np.log2(n),
        log2_k=np.log2(k),
        log_ratio=values[order, 2:].reshape(len(m), len(n), len(k)) / 100,
    )


@cache
def _constants() -> dict[str, KernelConstants]:
    path = _folder() / "devices.yaml"
    entries = checked(_File, read_mapping(path), file=str(path)).devices
    found: dict[str, KernelConstants] = {}
    for name, entry in entries.items():
        own = {field: getattr(entry, field) for field in KernelConstants.model_fields}
        if name == DEFAULT:
            found[name] = KernelConstants(**own)
            continue
        base = entry.like or DEFAULT
        assert base in found, f"{name} is like {base}, which must stand before it"
        said = {field: value for field, value in own.items() if value is not None}
        if "matmul" in said:
            said.setdefault("table", None)
        found[name] = found[base].model_copy(update=said)
    return found


def _folder() -> Path:
    return Path(str(files("costmodels") / "catalog" / "kernels"))


def _place(log2_size: FloatArray, grid: FloatArray) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """Lower neighbour on the grid, weight of the upper one, and distance outside of the grid in doublings, each [u]."""
    inside = np.clip(log2_size, grid[0], grid[-1])
    low = np.clip(np.searchsorted(grid, inside, side="right") - 1, 0, len(grid) - 2)
    weight = (inside - grid[low]) / (grid[low + 1] - grid[low])
    return low, weight, np.abs(log2_size - inside)


def _side(weight: FloatArray, upper: int) -> FloatArray:
    return weight if upper else 1 - weight
