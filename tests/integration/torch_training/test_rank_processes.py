import os
import resource
import signal
import sys
import time

import pytest

from tests.support.programs import rank_functions
from trials.ranks.messages import Exit, Told
from trials.torch_training.rank_setup import TORCH_RANKS


def _launch(processes, function, *arguments, num_ranks=2, **further):
    name = f"{function.__module__}:{function.__qualname__}"
    processes.launch(name, *arguments, num_ranks=num_ranks, **further)


def _until_ended(processes):
    events = []
    while processes.running:
        events += processes.events(60.0)
    return events


def test_ranks_form_a_group(on_ranks):
    """Every rank adds up what all ranks have, over gloo."""
    assert on_ranks(3, rank_functions.add_up) == [[3.0], [3.0], [3.0]]


def test_a_rank_that_raises_is_told_by_its_exit_and_log(rank_processes):
    """The traceback stands in the log, and the exit status is 1."""
    _launch(rank_processes, rank_functions.raise_on_rank_1)

    ends = {event.rank: event.code for event in _until_ended(rank_processes) if isinstance(event, Exit)}

    assert ends == {0: 0, 1: 1}
    assert "rank 1 has had enough" in rank_processes.printed()


def test_a_killed_rank_is_told_by_its_signal(rank_processes):
    """What a rank said before it was killed is kept, and its exit names the signal."""
    _launch(rank_processes, rank_functions.kill_itself, num_ranks=1)

    events = _until_ended(rank_processes)

    assert [event.value for event in events if isinstance(event, Told)] == ["before"]
    assert [event.code for event in events if isinstance(event, Exit)] == [-signal.SIGKILL]


@pytest.mark.parametrize("function", [rank_functions.hang, rank_functions.stop_itself])
def test_hanging_and_stopped_ranks_can_be_killed(rank_processes, function):
    """`kill` ends ranks that do nothing any more, and the next trial runs."""
    _launch(rank_processes, function)
    pids = _told(rank_processes, 2)

    ends = rank_processes.kill()

    assert {end.rank for end in ends} == {0, 1}
    assert not any(_is_alive(pid) for pid in pids)


def test_the_peak_of_memory_is_that_of_the_trial(rank_processes):
    """A rank that fills 300 MiB has them in its peak, and the rank of the next trial does not."""
    peaks = []
    for size in (300 * 2**20, 0):
        _launch(rank_processes, rank_functions.fill, size, num_ranks=1)
        peaks += [event.peak_bytes for event in _until_ended(rank_processes) if isinstance(event, Exit)]

    assert peaks[0] - peaks[1] > 250 * 2**20


def test_a_memory_limit_is_felt_as_a_memory_error(rank_processes):
    """A rank that wants more data than its limit fails with what torch says of it."""
    _launch(rank_processes, rank_functions.fill, 2**31, num_ranks=1, memory_limit_bytes=2**30)

    assert [event.code for event in _until_ended(rank_processes) if isinstance(event, Exit)] == [1]
    assert "allocate" in rank_processes.printed()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets others change a limit")
def test_a_lower_limit_of_the_system_holds(rank_processes):
    """Where the system allows less than the trial does, ranks run and feel the system's limit."""
    with type(rank_processes)(TORCH_RANKS) as processes:
        lowest = 2**30
        resource.prlimit(processes._server.pid, resource.RLIMIT_DATA, (lowest, lowest))
        for size, code in ((2**20, 0), (2**31, 1)):
            _launch(processes, rank_functions.fill, size, num_ranks=1, memory_limit_bytes=2**40)

            assert [event.code for event in _until_ended(processes) if isinstance(event, Exit)] == [code]
        assert "allocate" in processes.printed()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_ranks_die_with_their_server(rank_processes):
    """Whoever kills the server leaves no rank behind, not even a stopped one."""
    with type(rank_processes)(TORCH_RANKS) as processes:
        _launch(processes, rank_functions.stop_itself)
        pids = _told(processes, 2)
        os.kill(processes._server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has died"):
            _until_ended(processes)
    deadline_s = time.monotonic() + 10
    while any(map(_is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)

    assert not any(map(_is_alive, pids))


def _told(processes, count):
    values = []
    while len(values) < count:
        values += [event.value for event in processes.events(60.0) if isinstance(event, Told)]
    return values


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:  # noqa: PTH123 # not a file of ours
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
