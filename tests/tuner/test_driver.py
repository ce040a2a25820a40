import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import optuna
import pytest

from hardware.errors import ConfigError
from tests.tuner.driver_process import ROOT
from tuner.driver import DRIVER, RENEW_AFTER_S, STALE_AFTER_S, claim, interrupts_held, is_held
from tuner.storage import open_storage

NOW_S = 1_000_000.0
STUDY = "claimed"


@pytest.fixture
def url(tmp_path):
    """A database with one study in it."""
    address = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(study_name=STUDY, storage=open_storage(address))
    return address


@pytest.fixture
def storage(url):
    """That database, open."""
    opened = open_storage(url)
    yield opened
    opened.engine.dispose()


def held(storage):
    """The claim that stands on the study."""
    return storage.get_study_user_attrs(storage.get_study_id_from_name(STUDY)).get(DRIVER)


def set_held(storage, value):
    """Puts somebody's claim on the study."""
    storage.set_study_user_attr(storage.get_study_id_from_name(STUDY), DRIVER, value)


@contextmanager
def another_process(url, *, then="sys.stdin.readline()"):
    """A process that has claimed the study and waits; its claim's text stands in the database."""
    code = (
        "import sys, time\n"
        "from tuner.driver import claim\n"
        "from tuner.storage import open_storage\n"
        f"claim(open_storage({url!r}), {STUDY!r}, now_s={NOW_S})\n"
        "print('claimed', flush=True)\n"
        f"{then}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "claimed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_claim_is_written_renewed_and_released(storage):
    """A claim names the process, is written again only when it is old, and leaves nothing when released."""
    mine = claim(storage, STUDY, now_s=NOW_S)
    assert (held(storage)["pid"], held(storage)["host"]) == (os.getpid(), socket.gethostname())

    assert mine.renewed(now_s=NOW_S + RENEW_AFTER_S / 2) is mine
    renewed = mine.renewed(now_s=NOW_S + RENEW_AFTER_S)
    assert held(storage)["renewed_s"] == NOW_S + RENEW_AFTER_S
    renewed.release()

    assert held(storage) is None
    assert claim(storage, STUDY, now_s=NOW_S).renewed_s == NOW_S


def test_living_process_is_not_robbed_and_a_dead_one_is(url, storage):
    """A claim holds as long as its process lives, however old it is, and not a moment longer."""
    with another_process(url) as process:
        with pytest.raises(ConfigError, match=f"is being run by process {process.pid} on ") as caught:
            claim(storage, STUDY, now_s=NOW_S + 10 * STALE_AFTER_S)
        assert (caught.value.key, caught.value.value) == ("name", STUDY)
        process.kill()
        process.wait()

        claim(storage, STUDY, now_s=NOW_S)

    assert held(storage)["pid"] == os.getpid()


def test_number_that_was_given_again_does_not_hold(url, storage):
    """A living process that merely got the number of a dead driver does not hold the study."""
    with another_process(url):
        other = held(storage)
        assert is_held(other)
        assert not is_held(other | {"started": "another boot:1"})


def test_other_host_holds_while_it_renews(storage):
    """A claim of another host, whose processes cannot be seen, holds until it has not been renewed for long."""
    set_held(storage, {"host": "elsewhere", "pid": 1, "started": "b:1", "renewed_s": NOW_S})

    with pytest.raises(ConfigError, match="is being run by process 1 on elsewhere"):
        claim(storage, STUDY, now_s=NOW_S + STALE_AFTER_S - 1)
    claim(storage, STUDY, now_s=NOW_S + STALE_AFTER_S)


def test_driver_that_was_taken_over_stops(storage):
    """A driver that slept so long that another took its study over notices, and leaves the other's claim alone."""
    mine = claim(storage, STUDY, now_s=NOW_S)
    other = {"host": "elsewhere", "pid": 7, "started": "b:1", "renewed_s": NOW_S + 200}
    set_held(storage, other)

    with pytest.raises(ConfigError, match="is being run by process 7 on elsewhere"):
        mine.renewed(now_s=NOW_S + 201)
    mine.release()

    assert held(storage) == other


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_of_several_that_start_together_one_drives(kind, request, url):
    """Of processes that claim a study at the same moment, exactly one gets it."""
    if kind == "postgresql":
        url = request.getfixturevalue("postgresql")
        storage = open_storage(url)
        optuna.create_study(study_name=STUDY, storage=storage)
        storage.engine.dispose()
    code = (
        "import sys\n"
        "from hardware.errors import ConfigError\n"
        "from tuner.driver import claim\n"
        "from tuner.storage import open_storage\n"
        f"storage = open_storage({url!r})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n"
        f"    claim(storage, {STUDY!r}, now_s={NOW_S})\n"
        "except ConfigError as error:\n"
        "    print('refused', flush=True)\n"
        "else:\n"
        "    print('claimed', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = sorted(process.stdout.readline().strip() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    assert answers == ["claimed", "refused", "refused", "refused"]


@pytest.fixture
def handled():
    """Signals that reach the handlers of this test, in order."""
    seen = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in numbers}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_interrupt_waits_for_the_end_of_the_block(handled):
    """A signal that comes inside the block is handled after it, even if the block installed another handler."""
    with interrupts_held():
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert handled == []

    assert handled == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM] * 2


def test_second_interrupt_does_not_wait(handled):
    """Who presses Ctrl-C twice is heard at once."""
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        assert handled == []
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGINT]


def test_interrupts_are_nothing_to_other_threads(handled):
    """Outside the main thread, where Python installs no handlers, the block just runs."""
    ran = []

    def hold():
        with interrupts_held():
            ran.append(True)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()

    assert ran == [True]
    assert handled == []
