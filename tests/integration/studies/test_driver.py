import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import select

from hardware.io.errors import ConfigError
from tests.support.studies.driver_process import ROOT
from trials.ranks.unheard_signals import ENDING_SIGNALS
from tuner.run.driver import DRIVER, RENEW_AFTER_S, STALE_AFTER_S, WATCHED_S, claim, interrupts_held, is_held
from tuner.run.endings import PREEMPTED, ending_signals
from tuner.storage.history.tables import METADATA, make_tables
from tuner.storage.opening import open_store
from tuner.storage.store import Rows
from tuner.study_file.storage_address import StorageAddress

NOW_S = 1_000_000.0
STUDY = "claimed"

ONE_STORAGE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For claims about processes and clocks, which no storage changes."""


@pytest.fixture
def url(database):
    """A storage with one study in it."""
    store = open_store(StorageAddress.parse(database))
    optuna.create_study(study_name=STUDY, storage=store.storage)
    store.close()
    return database


@pytest.fixture
def store(url):
    """That storage, open."""
    opened = open_store(StorageAddress.parse(url))
    yield opened
    opened.close()


def held(store):
    """The claim that stands on the study."""
    return store.storage.get_study_user_attrs(study_id(store)).get(DRIVER)


def study_id(store):
    """What the storage calls the study."""
    return store.storage.get_study_id_from_name(STUDY)


def set_held(store, value):
    """Puts somebody's claim on the study."""
    store.storage.set_study_user_attr(study_id(store), DRIVER, value)


def set_attribute(store, key, value):
    """As a driver writes."""
    store.storage.set_study_user_attr(study_id(store), key, value)


@contextmanager
def another_process(url, *, then="sys.stdin.readline()", inside=()):
    """A process that has claimed the study and waits; its claim's text stands in the database."""
    code = (
        "import sys, time\n"
        "from tuner.run.driver import claim\n"
        "from tuner.storage.opening import open_store\n"
        "from tuner.study_file.storage_address import StorageAddress\n"
        f"claim(open_store(StorageAddress.parse({url!r})), {STUDY!r}, now_s={NOW_S})\n"
        "print('claimed', flush=True)\n"
        f"{then}\n"
    )
    process = subprocess.Popen(
        [*inside, sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "claimed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_claim_is_written_renewed_and_released(store):
    """A claim names the process, is written again only when it is old, and leaves nothing when released."""
    mine = claim(store, STUDY, now_s=NOW_S)
    assert (held(store)["pid"], held(store)["host"]) == (os.getpid(), socket.gethostname())

    assert not mine.renew(now_s=NOW_S + RENEW_AFTER_S / 2)
    assert mine.renew(now_s=NOW_S + RENEW_AFTER_S)
    assert held(store)["renewed_s"] == NOW_S + RENEW_AFTER_S
    mine.release()

    assert held(store) is None
    claim(store, STUDY, now_s=NOW_S)
    assert held(store)["renewed_s"] == NOW_S


@ONE_STORAGE
def test_living_process_is_not_robbed_and_a_dead_one_is(url, store):
    """A claim holds as long as its process lives, however old it is, and not a moment longer; another process that
    merely got its number does not hold it.
    """
    with another_process(url) as process:
        assert is_held(held(store))
        boot = held(store)["started"].partition(":")[0]
        assert not is_held(held(store) | {"started": f"{boot}:1"})
        with pytest.raises(ConfigError, match=f"is being run by process {process.pid} on ") as caught:
            claim(store, STUDY, now_s=NOW_S + 10 * STALE_AFTER_S)
        assert (caught.value.key, caught.value.value) == ("name", STUDY)
        process.kill()
        process.wait()

        claim(store, STUDY, now_s=NOW_S)

    assert held(store)["pid"] == os.getpid()


OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
"""Command before another, whose processes then are numbered from 1, as in a container."""


@ONE_STORAGE
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OWN_NAMESPACE, "true"], check=False).returncode != 0,
    reason="namespaces of processes need the right to make them",
)
def test_living_driver_in_a_container_with_this_hosts_name_is_not_robbed(url, store):
    """A claim from another namespace of processes holds while it is renewed, as one of another host does."""
    with another_process(url, inside=OWN_NAMESPACE):
        assert held(store)["host"] == socket.gethostname()
        with pytest.raises(ConfigError, match="is being run by process"):
            claim(store, STUDY, now_s=NOW_S + STALE_AFTER_S - 1)
        slept_s = []
        claim(store, STUDY, now_s=NOW_S + STALE_AFTER_S, sleep=slept_s.append)

    assert sum(slept_s) == pytest.approx(WATCHED_S)


@ONE_STORAGE
@pytest.mark.parametrize(
    "other", [{"pid_namespace": "pid:[1]"}, {"started": "another boot:1"}], ids=lambda one: next(iter(one))
)
def test_claim_of_another_machine_of_this_name_holds_while_it_is_renewed(store, other):
    """A host's name says nothing if the machine or the namespace of processes is another."""
    claim(store, STUDY, now_s=NOW_S)
    set_held(store, held(store) | {"pid": 2**22 + 1} | other)

    assert is_held(held(store), now_s=NOW_S + STALE_AFTER_S - 1)
    assert not is_held(held(store), now_s=NOW_S + STALE_AFTER_S)


@ONE_STORAGE
def test_other_host_holds_while_it_renews(store):
    """A claim of another host, whose processes cannot be seen, holds until it has not been renewed for long."""
    set_held(store, {"host": "elsewhere", "pid": 1, "started": "b:1", "renewed_s": NOW_S})

    with pytest.raises(ConfigError, match="is being run by process 1 on elsewhere"):
        claim(store, STUDY, now_s=NOW_S + STALE_AFTER_S - 1)
    slept_s, notes = [], []
    claim(store, STUDY, now_s=NOW_S + STALE_AFTER_S, on_note=notes.append, sleep=slept_s.append)

    assert sum(slept_s) == pytest.approx(WATCHED_S)
    assert notes == ["process 1 on elsewhere drove this study; watching 45 s whether it still does"]


@ONE_STORAGE
@pytest.mark.parametrize("behind_s", [-7200.0, -STALE_AFTER_S, STALE_AFTER_S, 7200.0], ids="{:+.0f} s".format)
def test_living_driver_of_another_host_is_not_robbed_whatever_its_clock_says(store, behind_s):
    """A claim that is renewed while it is watched holds, by however much the clocks of both hosts differ."""
    theirs = {"host": "elsewhere", "pid": 1, "started": "b:1", "renewed_s": NOW_S - behind_s}
    set_held(store, theirs)
    slept_s = []

    def sleep(seconds):
        slept_s.append(seconds)
        if sum(slept_s) >= RENEW_AFTER_S:
            set_held(store, theirs | {"renewed_s": theirs["renewed_s"] + RENEW_AFTER_S})

    with pytest.raises(ConfigError, match="is being run by process 1 on elsewhere"):
        claim(store, STUDY, now_s=NOW_S, sleep=sleep)

    assert held(store)["host"] == "elsewhere"
    assert RENEW_AFTER_S <= sum(slept_s) < WATCHED_S


@ONE_STORAGE
def test_claim_from_the_future_of_a_dead_driver_does_not_hold(store):
    """A driver that died before its clock was set back an hour holds its study no longer than any other."""
    set_held(store, {"host": "elsewhere", "pid": 1, "started": "b:1", "renewed_s": NOW_S + 3600})

    claim(store, STUDY, now_s=NOW_S, sleep=lambda _: None)

    assert held(store)["pid"] == os.getpid()


@ONE_STORAGE
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0], ids=["an hour back", "an hour on"])
def test_claim_is_renewed_at_once_after_a_jump(store, jump_s):
    """A driver whose clock is set writes its claim by the new time, and then as often as before."""
    mine = claim(store, STUDY, now_s=NOW_S)

    assert mine.renew(now_s=NOW_S + 1 + jump_s)
    assert held(store)["renewed_s"] == NOW_S + 1 + jump_s
    assert not mine.renew(now_s=NOW_S + 2 + jump_s)
    assert mine.renew(now_s=NOW_S + 1 + jump_s + RENEW_AFTER_S)


def test_driver_that_was_taken_over_stops(store):
    """A driver that slept so long that another took its study over notices, and leaves the other's claim alone."""
    mine = claim(store, STUDY, now_s=NOW_S)
    other = {"host": "elsewhere", "pid": 7, "started": "b:1", "renewed_s": NOW_S + 200}
    set_held(store, other)

    with pytest.raises(ConfigError, match="is being run by process 7 on elsewhere"):
        mine.renew(now_s=NOW_S + 201)
    mine.release()

    assert mine.is_lost
    assert held(store) == other


def test_a_claim_writes_together(store):
    """What a driver writes in one transaction is there when it ends, also where it renews its claim in between."""
    mine = claim(store, STUDY, now_s=NOW_S)

    with mine.together():
        set_attribute(store, "a", 1)
        set_attribute(store, "b", {"c": [2.5]})
    mine.renew(now_s=NOW_S + RENEW_AFTER_S)
    with mine.together():
        number = store.storage.get_trial(store.storage.create_new_trial(study_id(store))).number

    attributes = store.storage.get_study_user_attrs(study_id(store))
    assert (attributes["a"], attributes["b"], number) == (1, {"c": [2.5]}, 0)


def test_nothing_is_written_after_a_claim_was_lost(url, store):
    """No write of a driver that was taken over takes effect: attributes, trials, ends of trials, rows; nor do writes of
    a block that was not finished.
    """
    mine = claim(store, STUDY, now_s=NOW_S)
    make_tables(store)
    storage, study = store.storage, study_id(store)
    with mine.together():
        trial = storage.create_new_trial(study)
    with pytest.raises(ZeroDivisionError), mine.together():
        set_attribute(store, "unfinished", 1 / 0)
    another = open_store(StorageAddress.parse(url))
    set_held(another, {"host": "elsewhere", "pid": 7, "started": "b:1", "renewed_s": NOW_S + 200})

    key = {"version": 99}
    for write in (
        lambda: set_attribute(store, "late", 1),
        lambda: storage.set_trial_user_attr(trial, "late", 1),
        lambda: storage.set_trial_state_values(trial, TrialState.COMPLETE, [1.0]),
        lambda: storage.create_new_trial(study),
        lambda: store.replace_rows(Rows(table=METADATA.tables["meshtune_history"], key=key, rows=[key])),
        lambda: None,
    ):
        with pytest.raises(ConfigError, match="is being run by process 7 on elsewhere"), mine.together():
            write()

    for one in (store, another):
        (only,) = one.storage.get_all_trials(study)
        assert (only.state, only.user_attrs) == (TrialState.RUNNING, {})
        assert one.storage.get_study_user_attrs(study).keys() == {DRIVER}
        with one.connection(METADATA) as connection:
            assert connection.execute(select(METADATA.tables["meshtune_history"])).scalars().all() == [1]
    another.close()


@pytest.fixture
def handled():
    """Signals that reach the handlers of this test, in order."""
    seen = []
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in ENDING_SIGNALS}
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


def test_second_interrupt_does_not_wait(handled, monkeypatch):
    """Who presses Ctrl-C twice is heard at once, and a signal that repeats the first within a second is not."""
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert handled == []
    assert handled == [signal.SIGINT]

    monkeypatch.setattr("tuner.run.endings.SAME_S", 0.0)
    with interrupts_held():
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert handled == [signal.SIGINT] * 2


def exit_at_sigterm():
    """Get SIGTERM under a handler that exits, as Ray's does while it starts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    signal.raise_signal(signal.SIGTERM)


def test_an_exit_by_another_handler_is_the_signal_that_it_was(handled):
    """A block whose own handler of SIGTERM exits, as Ray's does while it starts, ends with what the signal means."""
    with pytest.raises(SystemExit), interrupts_held():
        exit_at_sigterm()

    assert handled == [signal.SIGTERM]


def test_a_run_that_is_told_to_end_while_ray_starts_is_preempted(handled):  # which puts its handlers back
    """SIGTERM that Ray turns into an exit counts as being told to end, not as the user's interrupt."""
    with pytest.raises(KeyboardInterrupt), ending_signals(lambda: None) as status, interrupts_held():
        exit_at_sigterm()

    assert status() == PREEMPTED
    assert handled == []


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
