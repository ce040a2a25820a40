import pytest

pytest.importorskip("torch", reason="the benchmarks need torch: pip install 'meshtune[torch]'")

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.operators.isolated import IsolatedCall
from trials.torch_training.benchmarks.device import DeviceBenchmarks
from trials.torch_training.benchmarks.messages import Refusal, Timing


@pytest.fixture
def benchmarks(rank_processes):
    """Benchmarks of this machine's CPU."""
    return DeviceBenchmarks(processes=rank_processes, device="cpu")


def collective(kind, message_bytes, size=2):
    """A collective in single precision."""
    shape = (float(message_bytes), float(size), 1.0)
    return IsolatedCall(kind=kind, phase=Phase.FORWARD, role="", precision="fp32", shape=shape)


def product(precision="fp32"):
    """A small product."""
    return IsolatedCall(
        kind=OpKind.MATMUL, phase=Phase.FORWARD, role="forward", precision=precision, shape=(32.0, 32.0, 32.0)
    )


def test_collectives_of_two_ranks(benchmarks):
    """Every kind runs between two processes, and 8 MB of each take longer than an element of each."""
    kinds = sorted(COLLECTIVES)
    sizes = (0, 2**23)
    found = dict(benchmarks.measure([collective(kind, size) for kind in kinds for size in sizes]))

    assert all(isinstance(timing, Timing) and timing.time_s > 0 and timing.runs >= 5 for timing in found.values())
    short_s, long_s = (sum(found[collective(kind, size)].time_s for kind in kinds) for size in sizes)
    assert long_s > short_s


def test_a_call_that_ends_its_process_is_refused_alone(benchmarks):
    """What kills the rank is told with its last words, and the calls behind it are measured by another one."""
    calls = [product(), product("unknown"), product("bf16")]

    found = list(benchmarks.measure(calls))

    assert [call for call, _ in found] == calls
    assert isinstance(found[0][1], Timing)
    assert found[1][1] == Refusal(reason="KeyError: 'unknown'")
    assert isinstance(found[2][1], Timing)


def test_what_torch_refuses_is_told_in_its_words(benchmarks):
    """A grouped product whose rows torch's kernel does not take is an answer, and no crash."""
    odd = IsolatedCall(
        kind=OpKind.GROUPED_MATMUL, phase=Phase.FORWARD, role="forward", precision="fp32", shape=(2.0, 8.0, 3.0, 5.0)
    )

    (first, refused), (_, timing) = benchmarks.measure([odd, product()])

    assert first == odd
    assert isinstance(refused, Refusal)
    assert refused.reason.startswith("RuntimeError: ")
    assert isinstance(timing, Timing)


def test_whoever_has_enough_leaves(benchmarks):
    """Leaving after the first call ends the rank, and the next measurement runs."""
    for _ in range(2):
        call, _ = next(benchmarks.measure([product(), product("bf16")]))
        assert call == product()
    assert not benchmarks.processes.running


def test_a_machine_without_gpus_says_so(benchmarks):
    """The GPUs that are told are those that torch can use."""
    import torch

    found = benchmarks.accelerators()

    assert found.count == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert bool(found.name) == bool(found.count)
