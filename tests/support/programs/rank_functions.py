"""Functions that ranks run in the tests of rank processes; a separate module, because ranks import it by name."""

import os
import resource
import signal
import threading
import time
from pathlib import Path


def add_up(place):
    """Add up the numbers of the ranks."""
    import torch
    import torch.distributed as dist

    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        number = torch.tensor(float(place.rank))
        dist.all_reduce(number)
        place.tell(number.item())


def raise_on_rank_1(place):
    """Raise on rank 1 only."""
    if place.rank == 1:
        raise ValueError("rank 1 has had enough")


def terminate_itself(_place):
    """Send itself SIGTERM, as `multiprocessing` does to processes that it ends."""
    signal.raise_signal(signal.SIGTERM)


def kill_itself(place):
    """Print a line and die by SIGKILL."""
    place.tell("before")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(place):
    """Report the process number, and sleep for ever."""
    place.tell(os.getpid())
    time.sleep(3600)


def stop_itself(place):
    """Report the process number, and stop the process."""
    place.tell(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def fill(place, size):
    """Allocate some memory."""
    import torch

    place.tell(float(torch.ones(size // 4).sum()))


FILLED_BYTES = 64 * 2**20
"""What the ranks below hold when they end."""


def end_speaking_of_memory(place, plan, line, is_aborted):
    """Let rank 1 print a line about memory and end without an exception, while rank 0 waits for it.

    C++ and the C library end a process in this way.
    """
    _train(place, plan, lambda: _end(place, line, is_aborted))


def start_a_thread_without_memory(place, plan):
    """Limit the memory of rank 1, so that a thread finds no room for its stack."""
    _train(place, plan, lambda: _start_a_thread(place))


def fail_with_memory(place, plan):
    """Let rank 1 raise the error of a thread without room for its stack, although memory is free."""
    _train(place, plan, lambda: _fail(place))


def _train(place, plan, deed):
    """A rank that does some deed when it should build its model, and then waits for the others."""
    import torch
    import torch.distributed as dist

    from trials.torch_training import rank_program

    def build(*_, **__):
        held = torch.ones(FILLED_BYTES // 4)
        deed()
        dist.all_reduce(held)

    rank_program.Trainer = build
    rank_program.run_rank(place, plan)


def _end(place, line, is_aborted):
    if place.rank == 1:
        print(line, flush=True)  # noqa: T201 # what a rank prints goes to its log
        os.abort() if is_aborted else os._exit(127)


def _start_a_thread(place):
    if place.rank == 1:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        held = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (held, held))
        threading.Thread(target=time.sleep, args=(0,)).start()


def _fail(place):
    if place.rank == 1:
        raise RuntimeError("Resource temporarily unavailable")
