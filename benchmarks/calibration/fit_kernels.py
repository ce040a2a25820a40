"""Fit the constants of catalog/kernels/devices.yaml to measured kernels, and write the tables of corrections.

    python -m benchmarks.calibration.fit_kernels OPS_DIR [--write]

OPS_DIR holds three CSV files of public measurements: aiconfigurator_gemm_bf16.csv and
aiconfigurator_attention_prefill_bf16.csv (both ai-dynamo/aiconfigurator, Apache-2.0), and simumax_op_efficiency.csv
(MooreThreads/SimuMax, Apache-2.0). Constants are fitted to one half of the shapes and judged on the other half; the
halves are the colours of a chessboard of n and k. The program prints constants and errors. With --write it writes the
tables, from all shapes.

Letters: u measured shapes.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from costmodels.operators.attention import AttentionConstants, attention_alone_s
from costmodels.operators.kernel_catalog import MatmulTable
from costmodels.operators.matmul import MatmulConstants, matmul_alone_s
from hardware.arrays import FloatArray
from hardware.device import Device, find_device

SYSTEMS = {
    "a100_sxm": "A100-SXM-80",
    "h100_sxm": "H100-SXM-80",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200",
    "gb200": "GB200",
    "l40s": "L40S",
}
TABLES = Path(__file__).resolve().parents[2] / "costmodels" / "catalog" / "kernels"
SMALLEST = 128
TABLE_STEP_M = 1024
PREPASS_SHARE = 0.85
MATMUL_START = (0.8, 0.95, 0.95, 0.95, 150.0, 0.4, 0.85, 4.0, 3e-6)
MATMUL_LOWER = (0.3, 0.5, 0.5, 0.3, 0.0, 0.0, 0.7, 1.5, 1e-6)
MATMUL_UPPER = (1.0, 1.0, 1.0, 1.0, 2000.0, 1.0, 1.0, 20.0, 1.5e-5)


def matmul_constants(x: FloatArray, group_latency_s: float = 0.0) -> MatmulConstants:
    """Build the constants from the free parameters x [9]."""
    values = [float(value) for value in x]
    return MatmulConstants(
        peak_share=values[0],
        tile_shares=(values[1], values[2], values[3]),
        ramp_k=values[4],
        wave_share=values[5],
        bandwidth_share=values[6],
        overlap_exponent=values[7],
        latency_s=values[8],
        group_latency_s=group_latency_s,
        fp8_share=0.88,
    )


def matmul_s(
    constants: MatmulConstants, device: Device, shapes: FloatArray, extra: FloatArray | float = 0.0
) -> FloatArray:
    """Compute the time of products (groups, m, k, n) [u, 4] with 16-bit operands and results [s].

    Args:
        constants: Constants of the products.
        device: Device that computes them.
        shapes: Numbers of groups, and the sizes m, k and n of each product [u, 4].
        extra: Bytes moved beyond 16-bit operands and results [u].
    """
    groups, m, k, n = shapes.T
    return matmul_alone_s(
        constants,
        groups=groups,
        m=m,
        k=k,
        n=n,
        moved_bytes=2 * groups * (m * k + k * n + m * n) + extra,
        peak_flop_per_s=device.peak_flop_per_s("bf16"),
        ramp_scale=1.0,
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=device.num_sms,
    )


def fitted(
    residual: Callable[[FloatArray], FloatArray],
    start: tuple[float, ...],
    lower: tuple[float, ...],
    upper: tuple[float, ...],
) -> FloatArray:
    """Fit by least squares of logarithms with damped outliers, and round to three digits as in the catalog."""
    # soft_l1 limits the pull of outliers beyond 5%; scaling by the start puts all constants on one order of magnitude.
    result = least_squares(
        residual, start, bounds=(lower, upper), x_scale=np.maximum(start, 1e-9), loss="soft_l1", f_scale=0.05
    )
    return np.array([float(f"{value:.3g}") for value in result.x])


def fit_matmul(device: Device, shapes: FloatArray, extra: FloatArray, measured_s: FloatArray) -> FloatArray:
    """Fit the free parameters [9] to these products."""
    return fitted(
        lambda x: np.log(matmul_s(matmul_constants(x), device, shapes, extra) / measured_s),
        MATMUL_START,
        MATMUL_LOWER,
        MATMUL_UPPER,
    )


def errors(computed_s: FloatArray, measured_s: FloatArray) -> str:
    """Format median and 90th percentile of the absolute relative error."""
    error = np.abs(computed_s / measured_s - 1)
    return f"median {np.median(error):.3f}, p90 {np.quantile(error, 0.9):.3f} of {len(error)}"


def best_roofline(flop: FloatArray, moved_bytes: FloatArray, device: Device, measured_s: FloatArray) -> FloatArray:
    """Compute the times of the flat roofline whose one efficiency fits these very shapes best.

    Memory runs at 0.85 of its peak.
    """
    # The baseline: a roofline with one efficiency, chosen with hindsight on the judged shapes.
    memory_s = moved_bytes / (0.85 * device.memory_bandwidth_bytes_per_s)
    times = [
        np.maximum(flop / (share * device.peak_flop_per_s("bf16")), memory_s) for share in np.arange(0.05, 1, 0.01)
    ]
    return min(times, key=lambda time: float(np.median(np.abs(time / measured_s - 1))))


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of one CSV file."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def chessboard(n: FloatArray, k: FloatArray) -> NDArray[np.bool_]:
    """Return whether each shape lies on a black square of the grid of distinct n and k [u]."""
    _, row = np.unique(n, return_inverse=True)
    _, column = np.unique(k, return_inverse=True)
    return np.asarray((row + column) % 2 == 0)


def table_of(shapes: FloatArray, log_ratio: FloatArray) -> MatmulTable:
    """Arrange log ratios [u] on the grid of the distinct m, n and k; gaps take the mean of their neighbours."""
    _, m, k, n = shapes.T
    # Measured shapes lie on a grid; searchsorted gives the place of each on every axis.
    axes = [np.unique(size) for size in (m, n, k)]
    grid = np.full([len(axis) for axis in axes], np.nan)
    grid[tuple(np.searchsorted(axis, size) for axis, size in zip(axes, (m, n, k), strict=True))] = log_ratio
    # Fill gaps from the known cells outwards: each pass gives every gap beside a known cell the mean of its neighbours.
    while np.isnan(grid).any():
        # Neighbours in n and k at the same m; NaN at the border counts as unknown.
        padded = np.pad(grid, ((0, 0), (1, 1), (1, 1)), constant_values=np.nan)
        around = np.stack([padded[:, :-2, 1:-1], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2], padded[:, 1:-1, 2:]])
        known = np.isfinite(around).any(axis=0) & np.isnan(grid)
        grid[known] = np.nanmean(around[:, known], axis=0)
    return MatmulTable(log2_m=np.log2(axes[0]), log2_n=np.log2(axes[1]), log2_k=np.log2(axes[2]), log_ratio=grid)


def write_table(table: MatmulTable, path: Path) -> None:
    """Write rows of m and n, with log ratios in percent for each k."""
    m, n, k = (np.rint(2**axis).astype(int) for axis in (table.log2_m, table.log2_n, table.log2_k))
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["m", "n", *(f"k{size}" for size in k)])
        for i, rows in enumerate(m):
            for j, columns in enumerate(n):
                writer.writerow([rows, columns, *np.rint(100 * table.log_ratio[i, j]).astype(int)])


def fit_aiconfigurator_matmul(folder: Path, *, write: bool) -> None:
    """Fit constants and tables of plain products."""
    everything = read(folder / "aiconfigurator_gemm_bf16.csv")
    for system, name in SYSTEMS.items():
        rows = [
            [1.0, float(r["m"]), float(r["k"]), float(r["n"]), float(r["latency_ms"]) * 1e-3]
            for r in everything
            if r["system"] == system
        ]
        data = np.array(rows)
        # The table holds m in multiples of TABLE_STEP_M, and n and k of at least SMALLEST.
        data = data[(data[:, 2] >= SMALLEST) & (data[:, 3] >= SMALLEST) & (data[:, 1] % TABLE_STEP_M == 0)]
        device, shapes, measured = find_device(name), data[:, :4], data[:, 4]
        # Neighbours on the grid fall into different halves, so that the table is judged by interpolation.
        black = chessboard(shapes[:, 3], shapes[:, 2])
        x = fit_matmul(device, shapes[black], np.zeros(black.sum()), measured[black])
        constants = matmul_constants(x)
        computed = matmul_s(constants, device, shapes)
        half = table_of(shapes[black], np.log(measured / computed)[black])
        white, (_, m, k, n) = shapes[~black], shapes[~black].T
        moved = 2 * (m * k + k * n + m * n)
        print(f"{name}: {constants}")
        print(f"  roofline {errors(best_roofline(2 * m * k * n, moved, device, measured[~black]), measured[~black])}")
        print(f"  formula  {errors(computed[~black], measured[~black])}")
        # The table was made from black shapes alone, so that its errors on white shapes are held-out errors.
        with_table = computed[~black] * half.correction(m, k, n)
        print(f"  + table  {errors(with_table, measured[~black])}; white shapes {len(white)}")
        if write:
            write_table(table_of(shapes, np.log(measured / computed)), TABLES / f"matmul-{name}.csv")


def simumax(folder: Path, device: str, operator: str) -> list[tuple[dict[str, str], float]]:
    """Read the shape and the share of the peak of every row."""
    return [
        (dict(re.findall(r"(\w+)=(\w+)", r["shape"])), float(r["efficiency"]))
        for r in read(folder / "simumax_op_efficiency.csv")
        if r["device"] == device and r["op"] == operator
    ]


def fit_simumax_matmul(folder: Path, name: str) -> None:
    """Fit constants of plain and grouped products on one of SimuMax's two devices."""
    device = find_device(name)
    peak = device.peak_flop_per_s("bf16")
    shapes, extra, measured = [], [], []
    for shape, share in simumax(folder, name, "matmul"):
        m, k, n = (float(shape[letter]) for letter in "mkn")
        # Accumulation reads and writes the result in its own precision, beyond a plain 16-bit write.
        width = {"False": 2, "True": {"bf16": 4, "fp32": 8}[shape["out_dtype"]]}[shape["accumulate"]]
        shapes.append((1.0, m, k, n))
        extra.append((width - 2) * m * n)
        # SimuMax publishes efficiencies; the time follows from the operations and the peak.
        measured.append(2 * m * k * n / (share * peak))
    plain, more, time = np.array(shapes), np.array(extra), np.array(measured)
    # Every second row is held out to judge the constants.
    half = np.arange(len(plain)) % 2 == 0
    x = fit_matmul(device, plain[half], more[half], time[half])
    constants = matmul_constants(x)
    computed = matmul_s(constants, device, plain, more)
    _, m, k, n = plain[~half].T
    flat = best_roofline(2 * m * k * n, 2 * (m * k + k * n + m * n) + more[~half], device, time[~half])
    print(f"{name} (SimuMax): {constants}")
    print(f"  roofline {errors(flat, time[~half])}")
    print(f"  formula  {errors(computed[~half], time[~half])}")
    for label, rows in (("into bf16", more == 0), ("accumulated", more > 0)):
        print(f"  {label}: measured over computed {np.exp(np.median(np.log(time / computed)[rows])):.3f}")
    fit_grouped(folder, name, device, constants, x)


def fit_grouped(folder: Path, name: str, device: Device, constants: MatmulConstants, x: FloatArray) -> None:
    """Fit the latency of each further group, with the constants of plain products on the same machine."""
    shapes, extra, measured = [], [], []
    for shape, share in simumax(folder, name, "group_matmul"):
        groups, m, n, k = (float(shape[key]) for key in ("ng", "M", "N", "K"))
        weight = shape["stage"] == "bwd_grad_w"
        width = {"fp32": 8, "bf16": 4}[shape["main_grad_dtype"]]
        shapes.append(
            # The three products of a grouped layer permute the roles of m, n and k.
            {"fwd": (groups, m, k, n), "bwd_grad_act": (groups, m, n, k), "bwd_grad_w": (groups, k, m, n)}[
                shape["stage"]
            ]
        )
        extra.append((width - 2) * groups * k * n if weight else 0.0)
        measured.append(2 * groups * m * k * n / (share * device.peak_flop_per_s("bf16")))
    grouped, more, time = np.array(shapes), np.array(extra), np.array(measured)
    half = np.arange(len(grouped)) % 2 == 0

    def computed(latency_s: float, rows: NDArray[np.bool_]) -> FloatArray:
        return matmul_s(matmul_constants(x, group_latency_s=latency_s), device, grouped[rows], more[rows])

    # One free parameter with a bounded range: a search over a grid is robust against outliers.
    latencies = np.linspace(0, 8e-6, 41)
    errors_of = [np.median(np.abs(np.log(computed(latency, half) / time[half]))) for latency in latencies]
    best = float(latencies[int(np.argmin(errors_of))])
    groups, m, k, n = grouped[~half].T
    flat = best_roofline(
        2 * groups * m * k * n, 2 * groups * (m * k + k * n + m * n) + more[~half], device, time[~half]
    )
    print(f"  grouped: group_latency_s={best:.2e}; constants of plain products {constants.peak_share}")
    print(f"    roofline {errors(flat, time[~half])}")
    print(f"    formula  {errors(computed(best, ~half), time[~half])}")
    for label, rows in (("plain", more == 0), ("accumulated", more > 0)):
        if rows.any():
            ratio = np.exp(np.median(np.log(time[rows] / computed(best, rows))))
            print(f"    {label}: measured over computed {ratio:.3f}")


def attention_s(constants: AttentionConstants, device: Device, shapes: FloatArray, flop: FloatArray) -> FloatArray:
    """Compute the time of attention shapes (batch, heads, sequence, head size) [u, 4] [s]."""
    batch, heads, length, head_size = shapes.T
    return attention_alone_s(
        constants,
        batch=batch,
        heads=heads,
        queries=length,
        head_size=head_size,
        flop=flop,
        moved_bytes=np.zeros_like(flop),
        peak_flop_per_s=device.peak_flop_per_s("bf16"),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=device.num_sms,
    )


def attention_constants(x: FloatArray) -> AttentionConstants:
    """Build the constants from x [6]: share of the peak, shares at head sizes 64 and above 128, ramp, tail, latency."""
    share, narrow, wide, ramp, tail, latency = (float(value) for value in x)
    return AttentionConstants(
        peak_share=share, head_shares=(narrow, 1.0, wide), ramp_tokens=ramp, tail_rows=tail, latency_s=latency
    )


def prefill_residual(
    device: Device, shapes: FloatArray, flop: FloatArray, copied_s: FloatArray, measured: FloatArray, x: FloatArray
) -> FloatArray:
    """Compute the log error of attention with x [7]: its constants [6], and passes of a copy that is timed too."""
    return np.asarray(
        np.log((attention_s(attention_constants(x[:6]), device, shapes, flop) + x[6] * copied_s) / measured)
    )


def core_constants(x: FloatArray) -> AttentionConstants:
    """Build the constants from x [4]: share of the peak, share at head sizes above 128, ramp, tail.

    The data do not determine the other constants.
    """
    return attention_constants(np.array([x[0], 0.9, x[1], x[2], x[3], 5e-6]))


def core_residual(
    device: Device, shapes: FloatArray, flop: FloatArray, measured: FloatArray, x: FloatArray
) -> FloatArray:
    """Compute the log error of attention with x [4]."""
    return np.asarray(np.log(attention_s(core_constants(x), device, shapes, flop) / measured))


def fit_aiconfigurator_attention(folder: Path) -> None:
    """Fit forward attention; the benchmark also copies keys and values to a cache, which is fitted and left out."""
    everything = read(folder / "aiconfigurator_attention_prefill_bf16.csv")
    keys = ("batch_size", "num_heads", "isl", "head_dim", "num_key_value_heads")
    for system, name in SYSTEMS.items():
        data = np.array(
            [
                [*(float(r[key]) for key in keys), float(r["latency_ms"]) * 1e-3]
                for r in everything
                if r["system"] == system
            ]
        )
        device, shapes, measured = find_device(name), data[:, :4], data[:, 5]
        batch, heads, length, size = shapes.T
        # Two products of 2 T^2 H operations each, half of them masked by causality.
        flop = 2 * batch * heads * length**2 * size
        # Time of one pass over queries, keys and values in 16 bits at a share of the memory bandwidth.
        copied_s = (
            2 * batch * length * size * (heads + 2 * data[:, 4]) / (PREPASS_SHARE * device.memory_bandwidth_bytes_per_s)
        )
        # Equal shapes with other numbers of key heads must fall into the same half.
        _, group = np.unique(shapes, axis=0, return_inverse=True)
        black = np.random.default_rng(0).random(group.max() + 1)[group.ravel()] < 0.5
        x = fitted(
            partial(prefill_residual, device, shapes[black], flop[black], copied_s[black], measured[black]),
            (0.55, 0.8, 1.0, 1000.0, 90.0, 1.5e-5, 2.0),
            (0.1, 0.3, 0.99, 0.0, 10.0, 1e-6, 0.0),
            (1.0, 1.2, 1.01, 3000.0, 600.0, 5e-5, 8.0),
        )
        constants = attention_constants(x[:6])
        computed = attention_s(constants, device, shapes, flop) + x[6] * copied_s
        print(f"{name} attention forward: {constants}, passes of the copy {x[6]:.2f}")
        flat = best_roofline(flop[~black], 0 * flop[~black], device, measured[~black])
        print(f"  roofline {errors(flat, measured[~black])}")
        print(f"  formula  {errors(computed[~black], measured[~black])}")


def fit_simumax_attention(folder: Path, name: str) -> None:
    """Fit forward and backward attention; the latency is fixed, because every row is long."""
    device = find_device(name)
    peak = device.peak_flop_per_s("bf16")
    for operator, products in (("sdp_fwd", 1.0), ("sdp_bwd", 2.5)):
        shapes, flops, measured = [], [], []
        for shape, share in simumax(folder, name, operator):
            batch, heads, length, size, value = (
                float(shape[key]) for key in ("batch", "head_num", "seq_len", "qk_head_dim", "v_head_dim")
            )
            shapes.append((batch, heads, length, size))
            # SimuMax's shares count the masked half of the work too
            flops.append(products * batch * heads * length**2 * (size + value))
            measured.append(2 * flops[-1] / (share * peak))
        data, flop, time = np.array(shapes), np.array(flops), np.array(measured)
        half = np.arange(len(data)) % 2 == 0
        limits = ((0.55, 0.85, 300.0, 50.0), (0.1, 0.3, 0.0, 0.0), (1.0, 1.3, 3000.0, 600.0))
        # `seen` is fitted to one half and judged on the other; `final` uses all rows and goes to the catalog.
        seen = core_constants(fitted(partial(core_residual, device, data[half], flop[half], time[half]), *limits))
        final = core_constants(fitted(partial(core_residual, device, data, flop, time), *limits))
        flat = best_roofline(flop[~half], 0 * flop[~half], device, time[~half])
        print(f"{name} {operator}: {final}")
        print(f"  roofline {errors(flat, time[~half])}")
        print(f"  formula  {errors(attention_s(seen, device, data[~half], flop[~half]), time[~half])}")


def main() -> None:
    """Fit all kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OPS_DIR", help="folder with the CSV files")
    parser.add_argument("--write", action="store_true", help="write the tables of corrections")
    arguments = parser.parse_args()
    fit_aiconfigurator_matmul(arguments.folder, write=arguments.write)
    fit_aiconfigurator_attention(arguments.folder)
    for name in ("A100-PCIe-80", "B200"):
        fit_simumax_matmul(arguments.folder, name)
        fit_simumax_attention(arguments.folder, name)


if __name__ == "__main__":
    main()
