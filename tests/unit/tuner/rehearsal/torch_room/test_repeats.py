"""Results that are made again are those that PyTorch makes: shapes, types, storages, and what is recorded of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - where PyTorch is

from tuner.rehearsal.torch_room import watch as watching  # noqa: E402 - as above
from tuner.rehearsal.torch_room.repeats import VIEWS  # noqa: E402 - as above
from tuner.rehearsal.torch_room.watch import Watch, WatchMode  # noqa: E402 - as above

pytestmark = pytest.mark.slow  # torch is optional


def base(size=24, dtype=torch.bfloat16):
    """A tensor without data."""
    return torch.empty(size, dtype=dtype)


def resized(tensor, size):
    """The tensor, after its storage got another size."""
    tensor.untyped_storage().resize_(size)
    return tensor


def derived(tensor):
    """The tensor, after a backward pass."""
    tensor.requires_grad_().view(4, 6).t().exp().sum().backward()
    return tensor


CALLS = {
    "own": (lambda x: [x.view(4, 6) + 1.5], base),
    "numbers of other types": (lambda x: [x + 1, x + 1.0, x + True], lambda: base(dtype=torch.long)),
    "in place": (lambda x: [x, x.add_(1), x.view(4, 6).mul_(2)], base),
    "views of views": (lambda x: [x, x[4:16], x[4:16].view(3, 4), x[4:16].view(3, 4).t()], base),
    "one place after another": (lambda x: [x, *(x[place : place + 4].view(2, 2) for place in range(0, 20, 4))], base),
    "parts": (lambda x: [x, *x.split(6), *x.chunk(2), *x.unbind()[:3]], base),
    "strides": (lambda x: [x + 1, x.contiguous(), x.clone(), x.expand(3, 6, 4)], lambda: base().view(4, 6).t()),
    "another shape": (lambda x: [x.reshape(24), x.t().reshape(24)], lambda: base().view(4, 6).t()),
    "out": (lambda x, y, z: [torch.add(x, y, out=z), torch.add(x, y, out=x), torch.add(x, x, out=y)], base, base, base),
    "out of another size": (lambda x, z: [torch.add(x, x, out=z)], base, lambda: base(0)),
    "three results": (lambda x: [*torch.native_layer_norm(x, (6,), None, None, 1e-5)], lambda: base().view(4, 6)),
    "lists": (lambda x, y: [*torch._foreach_add([x, y], 1), x, y, torch.cat([x, y]), torch.stack([x, y])], base, base),
    "shapes in place": (lambda x: [x, x.unsqueeze_(0), x.t_(), x.resize_(30)], base),
    "types": (lambda x: [x.float(), x.to(torch.long), torch.zeros_like(x, dtype=torch.uint8)], base),
    "known numbers": (lambda x: [torch.tensor([1, 2]) + 1, torch.tensor(3.0) * x], base),
    "complex": (lambda x: [x, x.conj(), x.real, x.conj().imag + 1], lambda: base(dtype=torch.complex64)),
    "freed storages": (lambda x: [resized(x, 0), x[4:8], x.view(4, 6)], base),
    "gradients": (lambda x: [derived(x), x.grad], lambda: base(dtype=torch.float32)),
}
"""Functions, each with what makes its arguments."""


def described(tensors):
    """All that can be seen of tensors, with their storages numbered as they appear."""
    places = {}
    return [
        (
            type(one).__name__,
            *(tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, one.device, one.requires_grad),
            *(one.is_conj(), one.is_neg(), one.untyped_storage().nbytes()),
            places.setdefault(one.untyped_storage()._cdata, len(places)),
        )
        for one in tensors
    ]


def recorded(name, times, monkeypatch=None):
    """What a call returns each time, and what is recorded of all of it; without repeats if they are switched off."""
    if monkeypatch is not None:
        monkeypatch.setattr(watching, "VIEWS", frozenset())
        monkeypatch.setattr(watching, "can_repeat", lambda _: False)
    watch = Watch()
    call, *makers = CALLS[name]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, WatchMode(watch):
        mode.cache_enabled = False  # as rehearsals have it: PyTorch's own lets a view grow the freed storage under it
        found = [described(call(*(make() for make in makers))) for _ in range(times)]
    return found, watch.operators, watch.storages.peak, watch.storages.live


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_pytorch(name, monkeypatch):
    """The first time, when it is learned, and twice more; operators, the peak and what is left alive are the same."""
    repeated = recorded(name, 3)

    assert repeated == recorded(name, 3, monkeypatch)


def test_results_are_made_again():
    """After the first time PyTorch is not asked for an addition, in place or not."""
    with FakeTensorMode(allow_non_fake_inputs=True), WatchMode(Watch()) as mode:
        asked = []
        run = mode._run
        mode._run = lambda func, args, kwargs: (asked.append(str(func)), run(func, args, kwargs))[1]
        for _ in range(4):
            base(7).add(1).add_(2)

    assert asked == ["aten.empty.memory_format", "aten.add.Tensor", "aten.add_.Tensor"]


def test_the_quick_views_are_views():
    """Each of them is a view by PyTorch's own schema, of its first argument."""
    assert all(func.is_view and len(func._schema.returns) == 1 for func in VIEWS)
