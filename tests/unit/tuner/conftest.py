"""Provide the command line to tests of the tuner."""

import sys

import pytest

from tests.support.studies.command_line import Done
from tuner.cli.main import main


@pytest.fixture
def meshtune(capsys, monkeypatch):
    """Runs a command line through `main` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["meshtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(status=ended.value.code, out=captured.out, err=captured.err)

    return call
