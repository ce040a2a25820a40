"""Provide the command line to tests of the tuner."""

import signal
import sys

import pytest

from tests.support.studies.command_line import Done
from trials.ranks.unheard_signals import ENDING_SIGNALS
from tuner.cli.main import main


@pytest.fixture
def meshtune(capsys, monkeypatch):
    """Runs a command line through `main` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, arguments)])
        before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        with pytest.raises(SystemExit) as ended:
            main()
        for number, handler in before.items():
            signal.signal(number, handler)
        captured = capsys.readouterr()
        return Done(status=ended.value.code, out=captured.out, err=captured.err)

    return call
