"""What ranks run in the tests of their processes; a module of its own, because ranks import it by name."""

import os
import signal
import time


def add_up(place):
    """Adds up the numbers of the ranks."""
    import torch
    import torch.distributed as dist

    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        number = torch.tensor(float(place.rank))
        dist.all_reduce(number)
        place.tell(number.item())


def raise_on_rank_1(place):
    """Raises on one rank."""
    if place.rank == 1:
        raise ValueError("rank 1 has had enough")


def kill_itself(place):
    """Says something and dies by SIGKILL."""
    place.tell("before")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(place):
    """Tells its process, and sleeps for ever."""
    place.tell(os.getpid())
    time.sleep(3600)


def stop_itself(place):
    """Tells its process, and stops it."""
    place.tell(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def fill(place, size):
    """Fills some memory."""
    import torch

    place.tell(float(torch.ones(size // 4).sum()))
