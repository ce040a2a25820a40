"""Which processes hear the signals that end a run."""

import signal
import subprocess
import sys
from pathlib import Path

from trials.command.process_tree import start_supervised
from trials.ranks.contract import RankSetup
from trials.ranks.processes import RankProcesses
from trials.ranks.unheard_signals import unheard

ENDS_ITSELF = "import os, signal; [os.kill(os.getpid(), signal.SIG{}) for _ in range(2)]; print('goes on')"


def outcome(name):
    """What a command comes to that sends itself a signal: its output and its status."""
    command = start_supervised([sys.executable, "-c", ENDS_ITSELF.format(name)], {}, Path())
    output = b"".join(iter(lambda: command.read(1000), b""))
    return output, command.wait()


def test_what_is_started_hears_no_signal_that_ends_a_run():
    """A process that the block starts goes on when all four signals are sent to it, and later ones hear them."""
    names = ("INT", "TERM", "HUP", "USR1")
    program = "; ".join(map(ENDS_ITSELF.format, names))
    with unheard():
        deaf = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    hears = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)

    assert (deaf.returncode, deaf.stdout) == (0, "goes on\n" * 4)
    assert hears.returncode != 0


def test_commands_of_trials_hear_them_again():
    """A trial's command, and what it starts, is ended by these signals, whatever its worker hears."""
    with unheard():
        ends = [outcome(name) for name in ("TERM", "HUP", "USR1")]

    assert ends == [(b"", -number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]


def test_ranks_of_trials_hear_them_again():
    """A rank, which may start processes and end them by SIGTERM, is ended by it."""
    with unheard(), RankProcesses(RankSetup()) as ranks:
        ranks.launch("tests.support.programs.rank_functions:terminate_itself", num_ranks=1)
        (end,) = ranks.events(60)

    assert end.code == -signal.SIGTERM
