from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from time import perf_counter

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from costmodels.blocks.operator import Family, Operator, OpKind, Phase
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernel_catalog import kernel_constants, matmul_table
from costmodels.operators.kernels import alone_s, kernel_s
from hardware.device import device_names, find_device
from tests.support.settings.random_settings import job_of

TABLED = [name for name in device_names() if kernel_constants(name).table]
SIZES = st.integers(min_value=1, max_value=1 << 17).map(float)
DEVICES = st.sampled_from(device_names())


def operator(kind, shape, flop, moved_bytes, *, phase=Phase.FORWARD, precision="bf16", name="op"):
    """One operator with one shape row."""
    return Operator(
        name=name,
        kind=kind,
        block="dense_mlp",
        family=Family.MLP,
        phase=phase,
        precision=precision,
        shape=np.array([shape], dtype=np.float64),
        flop=np.array([float(flop)]),
        moved_bytes=np.array([float(moved_bytes)]),
    )


def product(m, k, n, *, precision="bf16"):
    """A plain product [m, k] @ [k, n]."""
    width = 4 if precision == "fp32" else 2
    return operator(OpKind.MATMUL, (m, k, n), 2 * m * k * n, width * (m * k + k * n + m * n), precision=precision)


def grouped(groups, m, k, n, *, name="moe_mlp.up"):
    """A product of every expert; m is the sum over the experts, of a weight's gradient it is k."""
    weights = groups * (m * n if name.endswith("weight_gradient") else k * n)
    moved = 2 * (m * k + m * n + k * n - min(k * n, m * n) + weights)
    return operator(OpKind.GROUPED_MATMUL, (groups, m, k, n), 2 * m * k * n, moved, name=name)


def attention(batch, heads, length, size, *, phase=Phase.FORWARD, cp=1):
    """Causal flash attention with as many key heads as query heads."""
    work = 1.0 if phase == Phase.FORWARD else 2.5
    queries = length / cp
    flop = work * 2 * batch * heads * queries * length * size
    shape = (batch, heads, queries, length, size)
    return operator(OpKind.ATTENTION, shape, flop, work * 8 * batch * heads * queries * size, phase=phase)


def share_of_peak(op, device):
    """Share of the device's peak that the operator reaches alone."""
    return float((op.flop / alone_s(op, device) / device.peak_flop_per_s(op.precision))[0])


@given(m=SIZES, k=SIZES, n=SIZES, heads=st.integers(1, 128), phase=st.sampled_from(Phase), name=DEVICES, data=st.data())
def test_no_kernel_beats_its_device(m, k, n, heads, phase, name, data):
    """A product, and attention under the mask, take at least their work at the device's peak, however small."""
    length, size = data.draw(st.sampled_from([128, 512, 2048, 8192, 65536])), data.draw(st.sampled_from([32, 96, 256]))

    assert 0 < share_of_peak(product(m, k, n), find_device(name)) <= 1
    assert 0 < share_of_peak(attention(1, heads, length, size, phase=phase), find_device(name)) < 1


@given(m=st.integers(256, 1 << 15), k=st.integers(512, 1 << 14), n=st.integers(512, 1 << 14), name=DEVICES)
def test_twice_the_rows_take_longer(m, k, n, name):
    """Doubling m never makes a product more than 10% faster; a measured table may have that much noise."""
    device = find_device(name)

    assert alone_s(product(2 * m, k, n), device)[0] > 0.9 * alone_s(product(m, k, n), device)[0]


@given(small=SIZES, factor=st.floats(min_value=1, max_value=100), name=DEVICES)
def test_more_bytes_never_take_less_time(small, factor, name):
    """A memory-bound operator is no faster for moving more, and never faster than the memory's peak."""
    device = find_device(name)
    few, many = (operator(OpKind.NORM, (1, 1), 0, moved) for moved in (small, small * factor))

    assert alone_s(few, device) <= alone_s(many, device)
    assert alone_s(many, device)[0] > many.moved_bytes[0] / device.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_sensible_kernels(name):
    """Large products reach 0.5 to 0.95 of any device's peak, small ones less, attention less than products.

    A T4 is held back by its 70 W.
    """
    device = find_device(name)
    large, small = (share_of_peak(product(size, size, size), device) for size in (8192, 512))

    assert (0.35 if name == "T4-16" else 0.5) < large < 0.95
    assert small < large
    for phase in Phase:
        assert 0.15 < share_of_peak(attention(2, 32, 8192, 128, phase=phase), device) < large + 0.05


def test_only_an_unknown_device_gets_typical_kernels():
    """A device that the catalog of kernels does not name is computed with its own peaks and typical constants.

    No device of the catalog falls back to these, which predict another best configuration.
    """
    device = replace(find_device("A100"), name="A100-of-tomorrow", num_sms=None)
    named = yaml.safe_load(files("costmodels").joinpath("catalog/kernels/devices.yaml").read_text("utf-8"))["devices"]

    assert 0.6 < share_of_peak(product(8192, 8192, 8192), device) < 0.85
    assert set(device_names()) - set(named) == set()


# Measured: ai-dynamo/aiconfigurator (Apache-2.0), gemm_perf.txt, bf16. The tolerance is twice the 90th percentile of
# the error on shapes that no fit had seen.
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "share"),
    [
        ("A100-SXM-80", 4096, 4096, 4096, 0.86),
        ("A100-SXM-80", 8192, 1024, 4096, 0.71),
        ("A100-SXM-80", 1024, 512, 1024, 0.31),
        ("H100-SXM-80", 4096, 4096, 4096, 0.80),
        ("H100-SXM-80", 32768, 8192, 8192, 0.79),
        ("H100-SXM-80", 1024, 1024, 512, 0.22),
        ("H200-SXM", 8192, 4096, 1024, 0.70),
        ("B200", 8192, 8192, 4096, 0.74),
        ("B200", 1024, 1024, 1024, 0.21),
        ("GB200", 8192, 4096, 1024, 0.64),
        ("L40S", 4096, 4096, 2048, 0.68),
    ],
)
def test_measured_products(name, m, n, k, share):
    """Products take what they were measured to take, within 20%."""
    assert share_of_peak(product(m, k, n), find_device(name)) == pytest.approx(share, rel=0.2)


# Measured: FlashAttention-3 (Shah et al. 2024), figure 5, cuDNN on H100 SXM5, causal, head size 128, 16,384 tokens of
# 2,048 elements; FlashAttention at sizes of Megatron's models on A100 PCIe and B200: MooreThreads/SimuMax
# (Apache-2.0), configs/system, sdp_fwd and sdp_bwd, halved for the mask.
@pytest.mark.parametrize(
    ("name", "phase", "batch", "heads", "length", "tflops"),
    [
        ("H100-SXM-80", Phase.FORWARD, 16, 16, 1024, 410),
        ("H100-SXM-80", Phase.FORWARD, 4, 16, 4096, 518),
        ("H100-SXM-80", Phase.FORWARD, 1, 16, 16384, 539),
        ("A100-PCIe-80", Phase.FORWARD, 1, 32, 4096, 177),
        ("A100-PCIe-80", Phase.FORWARD, 1, 8, 4096, 121),
        ("A100-PCIe-80", Phase.BACKWARD, 1, 32, 4096, 152),
        ("A100-PCIe-80", Phase.BACKWARD, 1, 8, 4096, 119),
        ("B200", Phase.FORWARD, 1, 64, 4096, 980),
        ("B200", Phase.BACKWARD, 1, 32, 4096, 896),
    ],
)
def test_measured_attention(name, phase, batch, heads, length, tflops):
    """Attention runs at the speed it was measured to have, within 12%."""
    op = attention(batch, heads, length, 128, phase=phase)

    assert float(op.flop[0] / alone_s(op, find_device(name))[0]) / 1e12 == pytest.approx(tflops, rel=0.12)


# Measured: FlashAttention-3 (Shah et al. 2024), figures 5 and 6, FlashAttention-2 on H100 SXM5, head size 128; 16,384
# tokens of 2,048 elements; forward with a causal mask, backward without.
@pytest.mark.parametrize(
    ("phase", "batch", "length", "tflops"),
    [(Phase.FORWARD, 16, 1024, 260), (Phase.FORWARD, 1, 16384, 335), (Phase.BACKWARD, 1, 16384, 322)],
)
def test_flash_attention_2_is_slower_than_the_kernels_of_hopper(phase, batch, length, tflops):
    """FlashAttention-2 on H100 runs at the speed it was measured to have, within 5%; A100 has nothing faster."""
    op = attention(batch, 16, length, 128, phase=phase)
    hopper, ampere = find_device("H100-SXM-80"), find_device("A100-SXM-80")

    assert float(op.flop[0] / alone_s(op, hopper, is_flash2=True)[0]) / 1e12 == pytest.approx(tflops, rel=0.05)
    assert alone_s(op, hopper, is_flash2=True) > 1.4 * alone_s(op, hopper)
    assert alone_s(op, ampere, is_flash2=True) == alone_s(op, ampere)


# Measured: MooreThreads/SimuMax (Apache-2.0), configs/system/a100_pcie.json, group_matmul.
@pytest.mark.parametrize(
    ("groups", "tokens", "k", "n", "share"),
    [(40, 616, 5120, 3072, 0.631), (20, 1232, 5120, 3072, 0.707), (20, 1232, 1536, 5120, 0.675)],
)
def test_measured_grouped_products(groups, tokens, k, n, share):
    """Grouped products of some hundreds of tokens each take what they were measured to take, within 12%."""
    op = grouped(groups, groups * tokens, k, n)

    assert share_of_peak(op, find_device("A100-PCIe-80")) == pytest.approx(share, rel=0.12)


def test_few_tokens_per_expert_are_slow():
    """The same tokens spread over more experts take longer, in all three products of an expert's weight.

    A grouped product of one group takes what the plain product takes, but for the table that corrects the latter.
    """
    device, untabled = find_device("H100"), replace(find_device("A100"), name="no table")
    for name, m, k, n in (
        ("moe_mlp.up", 32768, 4096, 14336),
        ("moe_mlp.up.data_gradient", 32768, 14336, 4096),
        ("moe_mlp.up.weight_gradient", 4096, 32768, 14336),
    ):
        few, many = (alone_s(grouped(groups, m, k, n, name=name), device)[0] for groups in (4, 128))

        assert few < many
    plain_s = alone_s(product(4096, 4096, 8192), untabled)
    assert alone_s(grouped(1, 4096, 4096, 8192), untabled) == pytest.approx(plain_s)


def test_a_tile_begun_is_a_tile_paid():
    """Rows just beyond a multiple of the tile and of a wave cost more; a single tile leaves the device idle."""
    device = replace(find_device("A100"), name="no table")
    full, spilled = (share_of_peak(product(m, 4096, 108 * 128), device) for m in (256, 260))

    assert spilled < 0.8 * full
    assert share_of_peak(product(128, 4096, 128), find_device("H100")) < 0.05


def test_fp8_is_faster_but_not_by_its_peak():
    """On an H100 fp8 gives a large product 1.5 to 1.9 times the speed of bf16, and a small one hardly anything."""
    device = find_device("H100")
    large, small = (
        float(alone_s(product(n, n, n), device)[0] / alone_s(product(n, n, n, precision="fp8"), device)[0])
        for n in (8192, 256)
    )

    assert 1.5 < large < 1.9
    assert small < 1.3


def test_the_runtime_takes_its_share():
    """In a step an operator runs at the runtime's share of the speed that it has alone."""
    device, job = find_device("H100"), job_of()
    runtime = replace(
        find_runtime("megatron-core"),
        matmul_efficiency=0.5,
        grouped_matmul_efficiency=0.4,
        attention_efficiency=0.25,
        memory_efficiency=0.2,
    )
    for op, share in (
        (product(4096, 4096, 4096), 0.5),
        (grouped(8, 8192, 4096, 4096), 0.4),
        (attention(1, 32, 4096, 128), 0.25),
        (operator(OpKind.NORM, (4096, 4096), 0, 1e8), 0.2),
        (operator(OpKind.ELEMENTWISE, (1e8,), 0, 2e8), 0.2),
    ):
        assert kernel_s(op, device, job, runtime) == pytest.approx(alone_s(op, device) / share)


def test_ring_attention_shares_the_work():
    """With cp ranks each takes a little more than its part of the time, because its pieces are shorter."""
    device = find_device("H100")
    whole, part = (alone_s(attention(1, 16, 65536, 128, cp=cp), device)[0] for cp in (1, 8))

    assert whole / 8 < part < 1.3 * whole / 8


@pytest.mark.parametrize("name", TABLED)
def test_tables_fade_beyond_their_grid(name):
    """A table is exact on its own points, stays near one, and no longer matters far away from them."""
    table = matmul_table(str(kernel_constants(name).table))
    on_grid = table.correction(2.0 ** table.log2_m[:1], 2.0 ** table.log2_k[2:3], 2.0 ** table.log2_n[3:4])
    far = table.correction(np.array([2.0**40]), np.array([4096.0]), np.array([4096.0]))

    assert on_grid == pytest.approx(np.exp(table.log_ratio[0, 3, 2]))
    assert far == pytest.approx(1.0, abs=1e-3)
    assert np.all(np.abs(table.log_ratio) < 1.3)
    assert np.abs(np.median(table.log_ratio)) < 0.05


def test_a_grid_is_computed_in_no_time():
    """Thirty matrix products of 500 shapes each take far below a second."""
    rng = np.random.default_rng(0)
    m, k, n = 2.0 ** rng.uniform(7, 15, (3, 500))
    op = replace(product(1, 1, 1), shape=np.stack([m, k, n], axis=1), flop=2 * m * k * n, moved_bytes=m * k)
    device = find_device("H100")
    alone_s(op, device)
    start = perf_counter()
    for _ in range(30):
        alone_s(op, device)

    assert perf_counter() - start < 0.5
