"""Functions that the ranks of benchmarks run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from costmodels.operators.isolated import IsolatedCall
from trials.ranks.messages import Place
from trials.torch_training.benchmarks.collectives import time_collective
from trials.torch_training.benchmarks.kernels import time_call
from trials.torch_training.benchmarks.messages import Accelerators, Refusal
from trials.torch_training.process_group import process_group

LONGEST_REASON = 300


def tell_accelerators(place: Place) -> None:
    """Send the GPUs of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place.tell(Accelerators(count=count, name=torch.cuda.get_device_name(0) if count else ""))


def time_operators(place: Place, device: str, calls: Sequence[IsolatedCall]) -> None:
    """Send the time of each operator on one core or one GPU, or the reason why it cannot run."""
    torch.set_num_threads(1)
    for call in calls:
        try:
            place.tell(time_call(call, torch.device(device)))
        except (RuntimeError, ValueError, MemoryError) as error:  # torch raises these for unsupported calls
            place.tell(_refusal(error))


def time_collectives(place: Place, device: str, calls: Sequence[IsolatedCall]) -> None:
    """Run collectives among all ranks; the first rank sends their times."""
    with process_group(place, device) as found:
        for call in calls:
            timing = time_collective(call, found)
            if place.rank == 0:
                place.tell(timing)


def _refusal(error: Exception) -> Refusal:
    line = next(iter(str(error).strip().splitlines()), "")
    return Refusal(reason=f"{type(error).__name__}: {line}"[:LONGEST_REASON])
