"""What becomes of a trial one of whose ranks ends: told by that rank, or only by its end and by what it printed."""

import pytest

from tests.integration.torch_training.conftest import named
from tests.support.programs import rank_functions
from tests.support.programs.small_backends import DP, backend_of
from trials.backend import Status, ignore_step
from trials.training.watch import watch_ranks

LOADER = "cannot allocate memory for thread-local data: ABORT"
BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'"


@pytest.fixture
def observed(rank_processes):
    """Runs `function(place, plan, ...)` on two ranks; what the watch makes of it."""

    def run(function, *arguments):
        backend = backend_of()
        work = backend.work(DP)
        rank_processes.launch(named(function), work, *arguments, num_ranks=2)
        try:
            return watch_ranks(
                rank_processes,
                work,
                backend.framework,
                backend.cluster,
                num_ranks=2,
                cores=2,
                hang_limit_s=60.0,
                on_step=ignore_step,
            )
        finally:
            rank_processes.kill()

    return run


@pytest.mark.parametrize(("line", "is_aborted"), [(LOADER, False), (BAD_ALLOC, True)])
def test_a_process_that_was_ended_for_want_of_memory_is_out_of_memory(observed, line, is_aborted):
    """Where the C library or C++ end a rank, its last line says why, and its peak is that of the process."""
    found = observed(rank_functions.end_speaking_of_memory, line, is_aborted)

    assert (found.status, found.reason) == (Status.OUT_OF_MEMORY, f"rank 1: {line}")
    assert found.peak_memory_bytes > rank_functions.FILLED_BYTES


def test_a_thread_without_room_is_out_of_memory(observed):
    """An error that does not speak of memory is for want of it where the process can have no more."""
    found = observed(rank_functions.start_a_thread_without_memory)

    assert found.status is Status.OUT_OF_MEMORY, found.log_tail
    assert found.reason.startswith("rank 1 has used up its memory: RuntimeError: ")
    assert found.peak_memory_bytes > rank_functions.FILLED_BYTES


def test_the_same_error_with_room_is_a_crash(observed):
    """Nobody guesses a lack of memory where there is some."""
    found = observed(rank_functions.fail_with_memory)

    assert (found.status, found.reason) == (Status.CRASHED, "rank 1: RuntimeError: Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("is_aborted", "status", "reason"),
    [
        (False, Status.CRASHED, "rank 1 ended early with exit status 127"),
        (True, Status.INCIDENT, "rank 1 was killed by SIGABRT"),
    ],
)
def test_an_end_without_a_word_of_memory_is_no_lack_of_it(observed, is_aborted, status, reason):
    """What a rank printed decides; the other's lost connection does not hide the rank that ended."""
    found = observed(rank_functions.end_speaking_of_memory, "symbol lookup error", is_aborted)

    assert (found.status, found.reason) == (status, reason)
