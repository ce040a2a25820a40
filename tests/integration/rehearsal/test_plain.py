"""Rehearsals of programs of plain PyTorch, which call an optimizer's step in a loop of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.rehearsal.plain_study import rehearsed, sent

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

HIDDEN = 256
PARAMETERS = 4 * HIDDEN * HIDDEN


@pytest.mark.parametrize("start", [(), ("-m", "plain")])
def test_ddp_keeps_all_of_each_parameter(tmp_path, start):
    """Weights, two moments of Adam, and gradients twice: each and its bucket; they are summed over all eight ranks."""
    found = rehearsed(tmp_path, "plain.py", start=start)

    assert found["parameters"] == PARAMETERS
    assert found["parts_bytes"]["weights"] == 4 * PARAMETERS
    assert found["parts_bytes"]["gradients"] == 2 * 4 * PARAMETERS
    assert found["parts_bytes"]["optimizer"] == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert next(one["ranks"] for one in found["collectives"] if "allreduce" in one["name"]) == list(range(8))
    assert sent(found, "allreduce") == 4 * PARAMETERS


@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp1"])
def test_fsdp_shards_each_parameter(tmp_path, wrapper):
    """Of eight ranks each holds an eighth of weights and moments; it gathers each layer twice, and reduces it once."""
    found = rehearsed(tmp_path, "plain.py", "--wrapper", wrapper)

    assert found["parameters"] == PARAMETERS // 8
    assert found["parts_bytes"]["weights"] == 4 * PARAMETERS // 8
    assert found["parts_bytes"]["optimizer"] == pytest.approx(8 * PARAMETERS // 8, rel=0.01)
    assert sent(found, "gather") == 2 * 4 * PARAMETERS
    assert sent(found, "reduce_scatter") == 4 * PARAMETERS


def test_a_program_reads_its_data_and_scales_its_loss(tmp_path):
    """A loader with workers, recomputation, fp16 with a scaler, a compiled model: accepted, and told."""
    found = rehearsed(tmp_path, "plain.py", "--data", "--half", "--recompute", "--compile")

    assert found["verdict"] == "accepted", found["error"]
    assert any("GradScaler" in place for place in found["invented"])
    assert any("torch.compile" in place for place in found["invented"])
    assert not any("DataLoader" in place or "torch/utils" in place for place in found["invented"])


def test_a_copy_of_the_model_has_weights_of_its_own(tmp_path):
    """A program that averages its weights copies the model: its peak has them twice."""
    usual, averaged = (rehearsed(tmp_path, "plain.py", *words)["peak_bytes"] for words in ((), ("--average",)))

    assert averaged - usual == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("words", "named"),
    [(("--read", "no/such/tokens.bin"), "no/such/tokens.bin"), (("--read", "http://data.example/tokens"), "URLError")],
)
def test_missing_data_is_unknown_by_name(tmp_path, words, named):
    """A file that is not there, and one of the network: nothing is said of the layout."""
    found = rehearsed(tmp_path, "plain.py", *words, status=1)

    assert found["verdict"] == "unknown"
    assert named in found["error"]


CASTS = """\
from collections import Counter
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tuner.rehearsal.torch_room.attention import stand_in_for_attention
from tuner.rehearsal.torch_room.autocast import stand_in_for_autocast
from tuner.rehearsal.torch_room.watch import Watch, WatchMode

torch.cuda.get_device_capability = lambda *_: (9, 0)
stand_in_for_attention()
stand_in_for_autocast(Counter())
half, single = torch.bfloat16, torch.float32
watch = Watch()
with FakeTensorMode(), WatchMode(watch), torch.autocast("cuda", dtype=half):
    x = torch.empty(4, 8, 64, 64)
    assert torch.get_autocast_gpu_dtype() is half and torch.is_autocast_enabled()
    y = nn.functional.linear(x, torch.empty(64, 64))
    assert y.dtype is half
    for found in (
        nn.functional.layer_norm(y, (64,)), nn.functional.rms_norm(y, (64,)), y.softmax(-1), y.log_softmax(-1),
        y.sum(), y.sum(-1), y.pow(2), y.exp(), torch.rsqrt(y), y.cumsum(-1), torch.logsumexp(y, -1),
        nn.functional.cross_entropy(y.reshape(-1, 64), torch.zeros(2048, dtype=torch.long)),
    ):
        assert found.dtype is single, found.dtype
    assert (y @ y).dtype is half and nn.functional.gelu(y).dtype is half and (y + y).dtype is half
    q = torch.empty(2, 8, 128, 60, requires_grad=True)
    few = torch.empty(2, 2, 128, 60)
    assert nn.functional.scaled_dot_product_attention(q, few, few, dropout_p=0.1, enable_gqa=True).shape == q.shape
    mask = torch.empty(128, 128, dtype=torch.bool)
    assert nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).shape == q.shape
kernels = {name for name, _ in watch.operators}
assert "aten._scaled_dot_product_flash_attention.default" in kernels
assert "aten._scaled_dot_product_efficient_attention.default" in kernels
"""


def test_types_and_kernels_are_those_of_devices():
    """Types of autocast by PyTorch's list for CUDA; attention by the flash kernel, with a mask by the efficient one."""
    done = subprocess.run((sys.executable, "-c", CASTS), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]


VALUES = """\
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tuner.rehearsal.torch_room.known_values import answer_lists, values_of
from tuner.rehearsal.torch_room.watch import Watch, WatchMode

answer_lists()
watch = Watch()
with FakeTensorMode(allow_non_fake_inputs=True), WatchMode(watch):
    lengths = torch.tensor([3, 5, 2])
    assert (lengths.cumsum(0)[1:] + 1).tolist() == [9, 11] and lengths.max().item() == 5
    assert torch.arange(4)[torch.tensor([True, False, True, False])].tolist() == [0, 2]
    view = lengths[1:]
    view.add_(10)
    assert lengths.tolist() == [3, 15, 12]
    row = torch.arange(3000)
    assert values_of(row[:, None] == row[None]) is None
    assert not watch.invented
    lengths.copy_(torch.empty(3, dtype=torch.long))
    assert values_of(view) is None and view[0].item() == 1
    assert torch.empty(4).sum().item() == 1.0
    assert sum(watch.invented.values()) == 2, watch.invented
"""


def test_small_values_are_computed_and_forgotten_once_unknown():
    """Lengths, indices and views of them have their values, until something without data is written over them."""
    done = subprocess.run((sys.executable, "-c", VALUES), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
