"""Kernels that PyTorch composes otherwise on the CPU are counted in a rehearsal as those of a device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from tests.support.rehearsal.kernels import BATCH, HEADS, KV_HEADS, LENGTH, SIZE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alive():
    """Bytes alive after each case, and at the peak of its backward pass; in a process that is changed for good."""
    command = (sys.executable, "-m", "tests.support.rehearsal.kernels")
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_attention_keeps_its_output_and_a_number_a_row(alive):
    """Flash and efficient attention: q, k, v, the output, and an fp32 number a query and head; never the scores."""
    rows = BATCH * LENGTH * HEADS
    fewer = 2 * (2 + 2 * KV_HEADS / HEADS) * rows * SIZE + 4 * rows
    assert alive["flash"][0] == pytest.approx(2 * 4 * rows * SIZE + 4 * rows, abs=2048)
    assert alive["flash, fewer keys"][0] == pytest.approx(fewer, abs=2048)
    assert alive["efficient"][0] == pytest.approx(4 * 4 * rows * SIZE + 4 * rows, abs=2048)
    for name, width in (("flash", 2), ("flash, fewer keys", 2), ("efficient", 4)):
        assert alive[name][1] < width * rows * LENGTH


def test_a_norm_is_one_kernel_where_the_device_has_one(alive):
    """RMSNorm keeps its input, its output and a number a row; with a weight of another type it keeps fp32 copies."""
    values = 2 * LENGTH * SIZE
    assert alive["norm"][0] == pytest.approx(2 * values + 4 * LENGTH, abs=1024)
    assert alive["composed norm"][0] > 4 * values
