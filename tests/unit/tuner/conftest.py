"""Provide the command line to tests of the tuner, and predict the candidates of each study once for all of them."""

import pickle
import signal
import sys
from functools import wraps

import pytest
from optuna.storages._rdb.storage import _VersionManager

from tests.support.studies.command_line import Done
from trials.ranks.unheard_signals import ENDING_SIGNALS
from tuner.cli.main import main
from tuner.search import prior

MOST_REMEMBERED = 100


def remembered(function):
    """Return a pure function that computes the result of equal arguments once; of few, to bound what they take."""
    known = {}

    @wraps(function)
    def look_up(*given, **named):
        key = pickle.dumps((given, sorted(named.items())))
        if key not in known:
            if len(known) == MOST_REMEMBERED:
                known.clear()
            known[key] = function(*given, **named)
        return known[key]

    return look_up


@pytest.fixture(scope="session", autouse=True)
def predicted_once():
    """Hundreds of tests run the same few small studies, whose predictions take most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("predict", "_alternative", "simulated_times_s", "step_terms"):
            patch.setattr(prior, name, remembered(getattr(prior, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def migrations_read_once():
    """Whenever a database is opened, Optuna reads all its migrations to find the newest, which is always the same."""
    scripts = []

    def create_once(manager):
        if not scripts:
            scripts.append(create(manager))
        return scripts[0]

    create = _VersionManager._create_alembic_script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_VersionManager, "_create_alembic_script", create_once)
        yield


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
