"""Figures of optimizers against those of torch's and DeepSpeed's own on small weights."""

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 # needs torch
from torch.utils._pytree import tree_leaves  # noqa: E402 # needs torch
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 # needs torch

from costmodels.optimizers.contract import Widths  # noqa: E402 # after the check for torch
from costmodels.optimizers.registry import OPTIMIZERS  # noqa: E402 # after the check for torch

SHAPE = (256, 384)
FULL = Widths(4, 4, 4)
PLAIN = {"foreach": False}
KINDS = {
    "adam": (torch.optim.AdamW, PLAIN),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, **PLAIN}),
    "plain_sgd": (torch.optim.SGD, PLAIN),
    "adagrad": (torch.optim.Adagrad, PLAIN),
    "rmsprop": (torch.optim.RMSprop, PLAIN),
    "adafactor": (torch.optim.Adafactor, PLAIN),
    "muon": (torch.optim.Muon, {}),
}


class CountedBytes(TorchDispatchMode):
    """Bytes of large tensors that the operators of a step read and write, without those of matrix products."""

    def __init__(self, least):
        super().__init__()
        self.least, self.moved = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's signature
        found = func(*args, **(kwargs or {}))
        views = ("view", "detach", "alias", "aten.t.", "transpose", "permute", "empty_like", "zeros_like")
        if not any(view in str(func) for view in (*views, "addmm")):
            tensors = tree_leaves((args, kwargs, found))
            large = [one for one in tensors if isinstance(one, torch.Tensor) and one.numel() >= self.least]
            self.moved += sum(one.numel() * one.element_size() for one in large)
        return found


def stepped(name, shape=SHAPE):
    """Torch's optimizer of one weight after a step, which made its states."""
    kind, options = KINDS[name]
    weight = torch.nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    optimizer = kind([weight], lr=1e-3, **options)
    optimizer.step()
    return optimizer, weight


@pytest.mark.parametrize("name", KINDS)
def test_states_are_as_large_as_torchs(name):
    """The states of a matrix have exactly the bytes of torch's own, its count of steps apart."""
    optimizer, weight = stepped(name)
    own = sum(one.numel() * one.element_size() for one in optimizer.state[weight].values() if one.ndim)

    one = OPTIMIZERS[name]
    assert own == one.state_bytes("matrix", FULL) * weight.numel() + one.line_bytes("matrix", FULL) * sum(SHAPE)


def test_a_flat_shard_hides_its_matrices_from_adafactor():
    """Of a flat buffer, as DeepSpeed hands it to torch's optimizers, Adafactor keeps a whole second moment."""
    optimizer, weight = stepped("adafactor", (256 * 384,))

    assert optimizer.state[weight]["variance"].shape == weight.shape


def test_passes_of_adafactor_are_torchs():
    """Gradient and weight once, and what the entry says beside them, are what torch's operators read and write."""
    optimizer, weight = stepped("adafactor")
    with CountedBytes(weight.numel() // 2) as counted:
        optimizer.step()

    moved = 4 + 2 * 4 + OPTIMIZERS["adafactor"].further_bytes("matrix")
    assert counted.moved / weight.numel() == pytest.approx(moved)


def flops(rows, columns, method, steps=5):
    """FLOPs of the products of one matrix."""
    sides = np.array([float(rows)]), np.array([float(columns)])
    products = OPTIMIZERS["muon"].products(*sides, steps=steps, method=method)
    return sum(float((2 * p.m * p.k * p.n * p.times)[0]) for p in products)


@pytest.mark.parametrize("shape", [(128, 320), (320, 128), (192, 192)])
def test_products_are_torchs(shape):
    """Torch's Muon runs as many FLOPs in matrix products."""
    optimizer, _ = stepped("muon", shape)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()

    assert counted.get_total_flops() == flops(*shape, "standard")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("shape", [(128, 320), (320, 128), (192, 192)])
@pytest.mark.parametrize(("method", "steps"), [("gram", 5), ("gram", 2), ("gram", 7), ("standard", 5)])
def test_products_are_deepspeeds(shape, method, steps):
    """DeepSpeed's two methods run as many FLOPs in matrix products."""
    from deepspeed.runtime.zero.muon import original_muon  # slow to import

    name = "zeropower_via_gram_newtonschulz" if method == "gram" else "zeropower_via_newtonschulz5"
    function = getattr(original_muon, name)
    function = getattr(function, "_torchdynamo_orig_callable", function)
    with FlopCounterMode(display=False) as counted:
        function(torch.randn(shape), steps)

    assert counted.get_total_flops() == flops(*shape, method, steps)
