"""Constants of kernels by device, and tables of measured matrix products that correct them."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.operators.attention import AttentionConstants
from costmodels.operators.matmul import MatmulConstants, NotNegative, Share
from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping

DEFAULT = "default"
_FOLDER = Path(__file__).parents[1] / "catalog" / "kernels"


class MemoryConstants(StrictModel):
    """Constants of one device for operators that only move memory.

    Attributes:
        elementwise_share: Share of the memory's peak bandwidth that elementwise operators reach.
        norm_share: Share of the peak bandwidth that norms reach, which read their rows twice.
        latency_s: Time of an empty kernel [s].
    """

    elementwise_share: Share
    norm_share: Share
    latency_s: NotNegative


class KernelConstants(StrictModel):
    """Constants of one device for all kinds of kernels.

    Attributes:
        matmul: Constants of matrix products, plain and grouped.
        attention_forward: Constants of flash attention's forward pass.
        attention_backward: Constants of flash attention's backward pass.
        flash2_forward: Constants of FlashAttention-2's forward pass, on devices that have newer kernels; else None.
        flash2_backward: Constants of its backward pass.
        memory: Constants of operators that only move memory.
        table: Name of the table of measured products that corrects `matmul`; None where there is none.
    """

    matmul: MatmulConstants
    attention_forward: AttentionConstants
    attention_backward: AttentionConstants
    flash2_forward: AttentionConstants | None = None
    flash2_backward: AttentionConstants | None = None
    memory: MemoryConstants
    table: str | None = None

    def attention(self, *, is_forward: bool, is_flash2: bool) -> AttentionConstants:
        """Return the constants of one pass of flash attention, of FlashAttention-2 or of the device's best kernels."""
        newest = self.attention_forward if is_forward else self.attention_backward
        older = self.flash2_forward if is_forward else self.flash2_backward
        return older if is_flash2 and older is not None else newest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MatmulTable:
    """Measured matrix products of one device on a grid of sizes, as ratios to the computed time.

    Attributes:
        log2_m: Logarithm log2 of the rows on the grid [a].
        log2_n: Logarithm log2 of the columns on the grid [b].
        log2_k: Logarithm log2 of the lengths of sums on the grid [c].
        log_ratio: Logarithm of measured over computed time [a, b, c].
    """

    log2_m: FloatArray
    log2_n: FloatArray
    log2_k: FloatArray
    log_ratio: FloatArray

    def correction(self, m: FloatArray, k: FloatArray, n: FloatArray) -> FloatArray:
        """Return the factor on the computed time [u], trilinear in the logarithms.

        The logarithm of the factor halves with each doubling of a size beyond the grid.
        """
        low, weight, beyond = zip(
            *(_locate(np.log2(size), grid) for size, grid in ((m, self.log2_m), (n, self.log2_n), (k, self.log2_k))),
            strict=True,
        )
        # trilinear interpolation: the eight corners of the cell, weighted by nearness
        value = np.zeros(m.shape)
        for a, b, c in itertools.product((0, 1), repeat=3):
            corner = self.log_ratio[low[0] + a, low[1] + b, low[2] + c]
            value += corner * _weight_of(weight[0], a) * _weight_of(weight[1], b) * _weight_of(weight[2], c)
        return np.asarray(np.exp(value * 0.5 ** (beyond[0] + beyond[1] + beyond[2])))


def kernel_constants(device_name: str) -> KernelConstants:
    """Return the constants of the device of that catalog name, or default ones where it has none."""
    return _constants().get(device_name) or _constants()[DEFAULT]


@cache
def matmul_table(name: str) -> MatmulTable:
    """Read the table catalog/kernels/NAME.csv: rows of m, n, and the logarithm of the ratio in percent for each k."""
    with (_FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        header, *rows = csv.reader(lines)
    values = np.array(rows, dtype=np.float64)
    m, n = np.unique(values[:, 0]), np.unique(values[:, 1])
    k = np.array([float(column.removeprefix("k")) for column in header[2:]])
    assert len(values) == len(m) * len(n), f"{name}.csv must have one row for every m and n"
    # sorted by m, then n, so that rows reshape to the grid [a, b, c]
    order = np.lexsort((values[:, 1], values[:, 0]))
    return MatmulTable(
        log2_m=np.log2(m),
        log2_n=np.log2(n),
        log2_k=np.log2(k),
        log_ratio=values[order, 2:].reshape(len(m), len(n), len(k)) / 100,
    )


@cache
def _constants() -> dict[str, KernelConstants]:
    """Read the catalog; an entry takes the constants that it lacks from the entry that `like` names."""
    path = _FOLDER / "devices.yaml"
    merged: dict[str, dict[str, Any]] = {DEFAULT: {}}
    for name, entry in read_mapping(path)["devices"].items():
        base = entry.get("like", DEFAULT)
        assert base in merged, f"{name} is like {base}, which must stand before it"
        # a table corrects the formula of one set of constants, and no other
        inherited = merged[base] | ({"table": None} if "matmul" in entry else {})
        merged[name] = inherited | {key: value for key, value in entry.items() if key not in ("like", "fitted_to")}
    return {name: validate_mapping(KernelConstants, values, file=str(path)) for name, values in merged.items()}


def _locate(log2_size: FloatArray, grid: FloatArray) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
    """Return the lower neighbour on the grid, the upper one's weight, and the doublings beyond the grid, each [u]."""
    inside = np.clip(log2_size, grid[0], grid[-1])
    # the last cell holds its upper edge too, so that low + 1 is on the grid
    low = np.clip(np.searchsorted(grid, inside, side="right") - 1, 0, len(grid) - 2)
    weight = (inside - grid[low]) / (grid[low + 1] - grid[low])
    return low, weight, np.abs(log2_size - inside)


def _weight_of(weight: FloatArray, upper: int) -> FloatArray:
    return weight if upper else 1 - weight
