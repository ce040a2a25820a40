"""Real ranks for the tests of the trainer."""

import pytest

pytest.importorskip("torch", reason="the trainer needs torch: pip install 'meshtune[torch]'")

from trials.ranks.messages import Exit, Told
from trials.ranks.processes import RankProcesses
from trials.torch_training.rank_setup import TORCH_RANKS

LIMIT_S = 120.0


def named(function):
    """A function of a module as ranks import it."""
    return f"{function.__module__}:{function.__qualname__}"


@pytest.fixture(scope="session")
def rank_processes():
    """One server of ranks for all tests."""
    with RankProcesses(TORCH_RANKS) as processes:
        yield processes


@pytest.fixture(scope="session")
def on_ranks(rank_processes):
    """Runs `function(place, *arguments)` on each of n ranks; what they told, by rank. Fails if one of them fails."""

    def run(num_ranks, function, *arguments):
        rank_processes.launch(named(function), *arguments, num_ranks=num_ranks)
        told = [[] for _ in range(num_ranks)]
        while rank_processes.running:
            events = rank_processes.events(LIMIT_S)
            failed = [event for event in events if isinstance(event, Exit) and event.code]
            if failed or not events:
                rank_processes.kill()
                pytest.fail(f"{failed or 'hangs'}:\n{rank_processes.printed()[-6000:]}")
            for event in events:
                if isinstance(event, Told):
                    told[event.rank].append(event.value)
        return told

    return run
