"""The reducer of gradients against PyTorch's own, which is C++: the same messages, and the same gradients."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tuner.rehearsal.torch_room import reducer  # noqa: E402
from tuner.rehearsal.torch_room.storages import Storages  # noqa: E402

WIDTHS = (64, 96, 32, 160, 48)


class Network(nn.Module):
    """Layers of different sizes, one of which can be left out."""

    def __init__(self, uses_all):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in itertools.pairwise(WIDTHS))
        self.aside = nn.Linear(WIDTHS[0], WIDTHS[-1])
        self.uses_all = uses_all

    def forward(self, x):
        """Return the outputs of a batch."""
        out = x
        for layer in self.layers:
            out = layer(out)
        return out + self.aside(x) if self.uses_all else out


class Messages(TorchDispatchMode):
    """Lists the sums over the ranks, each as its number of elements."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allreduce" in str(func):
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _one_rank():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(options, uses_all):
    """The sums and the gradients of three steps, the second of which accumulates over two backward passes."""
    torch.manual_seed(7)
    model = DistributedDataParallel(Network(uses_all), **options)
    seen, gradients = [], []
    for step in range(3):
        with Messages() as messages:
            if step == 1:
                with model.no_sync():
                    model(torch.randn(4, WIDTHS[0])).square().mean().backward()
            model(torch.randn(4, WIDTHS[0])).square().mean().backward()
        seen.append(messages.sizes)
        gradients.append([None if one.grad is None else one.grad.clone() for one in model.parameters()])
        model.zero_grad(set_to_none=step == 0)
    return seen, gradients


@pytest.mark.parametrize(
    ("options", "uses_all"),
    [
        ({}, True),
        ({"bucket_cap_mb": 0.02}, True),
        ({"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}, True),
        ({"bucket_cap_mb": 0.02, "find_unused_parameters": True}, False),
        ({"bucket_cap_mb": 0.02, "static_graph": True}, True),
    ],
)
@pytest.mark.usefixtures("_one_rank")
def test_it_sends_what_the_reducer_of_pytorch_sends(monkeypatch, options, uses_all):
    """Three steps with buckets of 25 MB and 20 KB, as views, with an unused layer, and with a static graph."""
    theirs = trained(options, uses_all)
    monkeypatch.setattr(reducer.Reducer, "storages", Storages(), raising=False)
    monkeypatch.setattr(dist, "Reducer", reducer.Reducer)
    monkeypatch.setattr(dist, "Logger", reducer._Silent)
    ours = trained(options, uses_all)

    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        for mine, expected in zip(one, other, strict=True):
            assert (mine is None) == (expected is None)
            if mine is not None:
                torch.testing.assert_close(mine, expected)
