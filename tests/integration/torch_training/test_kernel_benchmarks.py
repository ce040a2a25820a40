import time

import pytest

pytest.importorskip("torch", reason="the benchmarks need torch: pip install 'meshtune[torch]'")

import torch

from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import PASSES, IsolatedCall
from trials.torch_training.benchmarks import kernels as kernel_benchmarks
from trials.torch_training.benchmarks.kernels import time_call
from trials.torch_training.benchmarks.timing import FEWEST_RUNS, MOST_RUNS, time_runs

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
CPU = torch.device("cpu")
PRODUCTS = (("forward", FORWARD), ("data_gradient", BACKWARD), ("weight_gradient", BACKWARD))


def call(kind, phase, role, *shape, precision="fp32"):
    """A call of those sizes."""
    return IsolatedCall(kind=kind, phase=phase, role=role, precision=precision, shape=tuple(map(float, shape)))


GROWING = [
    *((OpKind.MATMUL, phase, role, (64, 64, 64), (256, 256, 256)) for role, phase in PRODUCTS),
    *((OpKind.GROUPED_MATMUL, phase, role, (4, 64, 64, 64), (4, 256, 256, 256)) for role, phase in PRODUCTS),
    *((OpKind.ATTENTION, phase, "causal", (1, 2, 64, 64, 32), (1, 2, 512, 512, 32)) for phase in Phase),
    *((OpKind.ATTENTION, phase, "causal", (1, 2, 32, 64, 32), (1, 2, 256, 512, 32)) for phase in Phase),
    *((OpKind.NORM, phase, role, (64, 256), (4096, 256)) for phase in Phase for role in ("rms_norm", "layer_norm")),
    *((OpKind.ELEMENTWISE, phase, role, (2**14,), (2**20,)) for phase in Phase for role in PASSES),
]


@pytest.fixture(autouse=True)
def one_thread():
    """As a rank has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "phase", "role", "small", "large"), GROWING)
def test_time_grows_with_the_work(kind, phase, role, small, large):
    """Every operator runs in both phases, and 64 times the work takes several times as long."""
    short, long = (time_call(call(kind, phase, role, *shape), CPU) for shape in (small, large))

    assert long.time_s > 3 * short.time_s > 0
    assert short.runs >= FEWEST_RUNS


@pytest.fixture
def data(monkeypatch):
    """The tensors that a benchmark has made, in order."""
    made = []
    make = kernel_benchmarks._make_data

    def keep(*shape, **options):
        made.append(make(*shape, **options))
        return made[-1]

    monkeypatch.setattr(kernel_benchmarks, "_make_data", keep)
    return made


def test_products_are_those_of_a_linear_layer(data):
    """The three products of a layer [m, k] x [n, k] are what autograd gets for its output and both gradients."""
    m, k, n = 6, 8, 10
    forward = kernel_benchmarks.matmul(call(OpKind.MATMUL, FORWARD, "forward", m, k, n), CPU)()
    x, weight = data[:2]
    expected = torch.nn.functional.linear(x.requires_grad_(), weight.requires_grad_())
    of_x = kernel_benchmarks.matmul(call(OpKind.MATMUL, BACKWARD, "data_gradient", m, n, k), CPU)
    of_weight = kernel_benchmarks.matmul(call(OpKind.MATMUL, BACKWARD, "weight_gradient", k, m, n), CPU)
    with torch.no_grad():  # both run on data of their own: give them the layer's
        data[3].copy_(weight)
        data[4].copy_(data[2])
        data[5].copy_(x)
    gradients = torch.autograd.grad(expected, (x, weight), data[2])

    torch.testing.assert_close(forward, expected)
    torch.testing.assert_close(of_x(), gradients[0])
    torch.testing.assert_close(of_weight(), gradients[1])


def test_grouped_products_are_those_of_each_group(data):
    """Equal shares of the rows meet a weight each, forward and in both gradients."""
    groups, m, k, n = 2, 8, 16, 32
    shapes = {"forward": (groups, m, k, n), "data_gradient": (groups, m, n, k), "weight_gradient": (groups, k, m, n)}
    found = {
        role: kernel_benchmarks.grouped_matmul(call(OpKind.GROUPED_MATMUL, phase, role, *shapes[role]), CPU)()
        for role, phase in PRODUCTS
    }
    x, weights, g, same_weights, of_weights_g, of_weights_x = data
    halves = (slice(0, m // 2), slice(m // 2, m))

    for group, rows in enumerate(halves):
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found["forward"][rows], x[rows] @ weights[group].t(), **close)
        torch.testing.assert_close(found["data_gradient"][rows], g[rows] @ same_weights[group], **close)
        expected = of_weights_g[rows].t() @ of_weights_x[rows]
        torch.testing.assert_close(found["weight_gradient"][group], expected, **close)


def test_half_precision_runs_too():
    """A bf16 study measures bf16 kernels."""
    assert time_call(call(OpKind.MATMUL, FORWARD, "forward", 64, 64, 64, precision="bf16"), CPU).time_s > 0


def test_a_core_is_timed_by_its_own_work():
    """Waiting is no work: on a shared machine other programs are none of an operator's time."""
    assert time_runs([lambda: time.sleep(0.01)], CPU).time_s < 2e-3


def test_sets_of_data_take_turns_and_runs_end():
    """Every set is warmed up once; a call that costs nothing is still not repeated for ever."""
    ran = []
    timing = time_runs([lambda: ran.append(0), lambda: ran.append(1)], CPU)

    assert ran[:6] == [0, 1, 0, 1, 0, 1]
    assert timing.runs == MOST_RUNS == len(ran) - 2
