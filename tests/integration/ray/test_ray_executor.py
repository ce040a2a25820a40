import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.support.process_table import marked_processes
from hardware.io.errors import ConfigError
from tests.support.programs.misbehaving_backend import NUM_STEPS, SECONDS_AFTER_STEPS, MisbehavingBackend, config_that
from trials.backend import Status
from trials.on_ray.executor import RayExecutor
from trials.on_ray.mailbox import Mailbox

ROOT = Path(__file__).resolve().parents[3]
SLOTS = 2
TIME_LIMIT_S = 6.0
"""Limit of a trial [s]. On a busy machine a step may take seconds to reach the driver."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where trials leave a mark of what they did."""
    return tmp_path_factory.mktemp("attempts")


@pytest.fixture(scope="module")
def executor(folder):
    """One local Ray for all tests that leave it whole."""
    with RayExecutor(
        MisbehavingBackend(folder=str(folder)),
        parallel_trials=SLOTS,
        study="misled",
        time_limit_s=TIME_LIMIT_S,
        address="local",
    ) as running:
        process_of_mailbox(running)
        yield running


def process_of_mailbox(executor, limit_s=60.0):
    """Waits until the mailbox answers, which takes longer than the tests' trials last; its process ID."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return executor._ray.get(executor._mailbox.__ray_call__.remote(lambda _: os.getpid()), timeout=1.0)
        except executor._ray.exceptions.RayError:
            assert time.monotonic() < deadline_s, "the mailbox does not answer"
            time.sleep(0.1)


def observe(executor, deeds, limit_s=60.0):
    """Runs trials that do `deeds` (by trial number) on all slots; their observations by number."""
    waiting, ended = dict(deeds), {}
    deadline_s = time.monotonic() + limit_s
    while waiting or executor.pending:
        assert time.monotonic() < deadline_s, f"still pending: {executor.pending}"
        while waiting and executor.num_free_slots:
            number = next(iter(waiting))
            executor.submit(number, config_that(waiting.pop(number)))
        ended |= dict(executor.poll(1.0))
    return ended


def start_all_workers(executor):
    """Waits until every slot has a worker that the executor knows to have started."""
    executor._ray.get([place.ready for place in executor._places])
    executor.poll(0.0)


class NeverStarting:
    """Class of actors that wait for a resource that no machine has."""

    def __init__(self, slot_class):
        self.slot_class = slot_class

    def options(self, **options):
        """Ask for the resource as well."""
        return self.slot_class.options(**options, resources={"of_no_machine": 1})


def is_gone_soon(exists, limit_s=5.0):
    """Whether what `exists` looks for is gone within the limit: a killed process takes a moment to end."""
    deadline_s = time.monotonic() + limit_s
    while exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return not exists()


def test_a_trial_has_its_name_in_ray_and_in_the_table_of_processes(executor):
    """Study, number and attempt name a trial, its task and its process; a worker that dies makes it another attempt."""
    names = set()

    def look():
        """Collect the names of the trial's processes until both attempts were seen."""
        deadline_s = time.monotonic() + 60.0
        while len(names) < 2 and time.monotonic() < deadline_s:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):  # it has ended
                    names.update(re.findall(r"ray::(misled/77\.\d)", path.read_text(errors="replace")))

    looking = threading.Thread(target=look)
    looking.start()
    observe(executor, {77: "step_and_die"})
    looking.join()

    assert names == {"misled/77.0", "misled/77.1"}
    start_all_workers(executor)  # the one that died is started again, and until then its slot is not free


def test_more_trials_than_slots_all_end(executor):
    """Eight trials on two slots each come back once, with their own result."""
    ended = observe(executor, dict.fromkeys(range(8), "succeed"))

    assert {number: o.step_time_s for number, o in ended.items()} == {number: 1.0 + number for number in range(8)}
    assert executor.num_free_slots == SLOTS
    assert executor.slots_note == ""


def test_pending_trials_hold_their_slot(executor):
    """A submitted trial is pending and takes a slot until `poll` has returned it."""
    executor.submit(7, config_that("succeed"))

    assert executor.pending == (7,)
    assert executor.num_free_slots == SLOTS - 1
    assert [number for number, _ in executor.poll(30.0)] == [7]
    assert executor.pending == ()


def test_polling_an_idle_executor_does_not_wait(executor):
    """With nothing pending there is nothing to wait for."""
    begin_s = time.monotonic()

    assert executor.poll(600.0) == []
    assert time.monotonic() - begin_s < 60.0


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raise", "ValueError: the loss is not a number"),
        ("exit", "SystemExit: wrong flag"),
        ("give_a_lambda", "AssertionError: `measure` gives an Observation"),
    ],
)
def test_what_a_trial_raises_is_a_crash(executor, deed, reason):
    """An exception in a trial comes back as crashed, with its last line as reason and the traceback in the log."""
    observation = observe(executor, {0: deed})[0]

    assert observation.status is Status.CRASHED
    assert observation.reason.startswith(reason)
    assert observation.log_tail.startswith("Traceback (most recent call last):")
    assert observation.origin == "synthetic"


def test_a_worker_that_dies_once_is_replaced(executor):
    """A trial whose worker is killed runs again in a fresh one and can end well; the observation tells of the retry and
    of the time that the first attempt took.
    """
    observe(executor, dict.fromkeys(range(SLOTS), "succeed"))  # the time counts from when a worker is known to run
    observation = observe(executor, {100: "die_once"})[100]

    assert observation.status is Status.OK
    assert observation.reason.startswith("retried once, because its worker died")
    assert observation.lost_s > 0


def test_later_trials_run_on_the_backend_that_was_taken(executor, folder, tmp_path):
    """Trials that run when another backend is taken end on theirs; all slots measure later ones on the new one."""
    observe(executor, dict.fromkeys(range(SLOTS), "succeed"))
    executor.submit(200, config_that("step_and_hang"))
    executor.take(MisbehavingBackend(folder=str(tmp_path)))
    executor.cancel(200, "enough")
    ended = dict(executor.poll(60.0)) | observe(executor, {201: "die_once", 202: "die_once"})
    executor.take(MisbehavingBackend(folder=str(folder)))

    assert ended[200].status is Status.CANCELLED
    assert {path.name for path in tmp_path.iterdir()} == {"died-201", "died-202"}
    assert [ended[number].status for number in (201, 202)] == [Status.OK, Status.OK]


def test_a_worker_that_dies_twice_is_an_incident(executor):
    """A second death gives the trial up without blaming the candidate, and the slot works on."""
    ended = observe(executor, {0: "die", 1: "succeed", 2: "succeed"})

    assert ended[0].status is Status.INCIDENT
    assert "second attempt" in ended[0].reason
    assert ended[1].status is ended[2].status is Status.OK


def test_a_trial_is_cut_off_at_its_limit(executor, folder):
    """A hanging trial ends at the limit as timeout, with the processes it started, and its slot works on."""
    begin_s = time.monotonic()
    ended = observe(executor, {0: "hang_with_child", 1: "hang", 2: "succeed", 3: "succeed"})

    assert ended[0].status is ended[1].status is Status.TIMEOUT
    assert f"{TIME_LIMIT_S:g} s" in ended[0].reason
    assert ended[2].status is ended[3].status is Status.OK
    assert time.monotonic() - begin_s < 30.0
    assert is_gone_soon(lambda: Path(f"/proc/{(folder / 'child').read_text()}").exists())


def follow(executor, number, num_steps, limit_s=30.0):
    """Polls until a running trial has reported that many steps; what it has reported then."""
    deadline_s = time.monotonic() + limit_s
    while len(executor.reported[number]) < num_steps:
        assert time.monotonic() < deadline_s, f"reported {executor.reported}"
        assert executor.poll(1.0) == []
    return executor.reported[number]


def test_steps_are_seen_while_a_trial_runs(executor):
    """A running trial's steps are here soon after they end, and those of the trials beside it stay apart."""
    executor.submit(0, config_that("step_on"))
    executor.submit(1, config_that("hang"))

    steps_s = follow(executor, 0, 3)

    assert set(steps_s) == {3.0}
    assert executor.reported[1] == ()
    for number in (0, 1):
        executor.stop(number, "enough")
    assert sorted(number for number, _ in executor.poll(30.0)) == [0, 1]
    assert executor.reported == {}


def test_a_stopped_trial_ends_early(executor):
    """A trial that is stopped is pruned before its next step, with its steps and what it would have measured, and its
    slot works on.
    """
    executor.submit(5, config_that("step_on"))
    follow(executor, 5, 2)

    executor.stop(5, "slower than the best")
    ((number, observation),) = executor.poll(30.0)

    assert (number, observation.status, observation.reason) == (5, Status.PRUNED, "slower than the best")
    assert 2 <= len(observation.step_times_s) < NUM_STEPS
    assert observation.expected_steps == NUM_STEPS
    assert observation.saved_s == 3.0 * (NUM_STEPS - len(observation.step_times_s))
    assert executor.num_free_slots == SLOTS
    assert observe(executor, {6: "succeed"})[6].status is Status.OK


def test_a_cancelled_trial_ends_at_once(executor):
    """A trial that is cancelled while it hangs says nothing about its configuration, tells its time, and its slot works
    on.
    """
    executor.submit(7, config_that("hang"))
    executor.poll(1.0)

    executor.cancel(7, "the budget of time is spent")
    executor.cancel(7, "once more")
    executor.cancel(8, "nobody knows this trial")
    assert executor.pending == (7,)
    ((number, observation),) = executor.poll(30.0)

    assert (number, observation.status, observation.step_times_s) == (7, Status.CANCELLED, ())
    assert observation.reason == "the budget of time is spent"
    assert executor.num_free_slots == SLOTS
    assert observe(executor, {9: "succeed"})[9].status is Status.OK


def test_stopping_what_has_ended_changes_nothing(executor):
    """A trial that ends before it can be stopped keeps its result."""
    executor.submit(3, config_that("succeed"))
    (result,) = (place.trial.result for place in executor._places if place.trial is not None)
    while not executor._is_there(result):
        time.sleep(0.01)

    executor.stop(3, "too late")
    executor.stop(4, "nobody knows this trial")

    ((number, observation),) = executor.poll(30.0)
    assert (number, observation.step_time_s) == (3, 4.0)


@pytest.mark.parametrize(
    ("deed", "status", "steps_s"),
    [
        ("step_and_hang", Status.TIMEOUT, (1.5, 2.5)),
        ("step_and_raise", Status.CRASHED, (1.5,)),
        ("step_and_die", Status.INCIDENT, (1.5, 2.5)),
        ("report_nonsense", Status.CRASHED, ()),
    ],
)
def test_a_failed_trial_keeps_its_steps(executor, deed, status, steps_s):
    """However a trial fails, the steps that it has reported in its last attempt are in its observation."""
    observation = observe(executor, {0: deed})[0]

    assert (observation.status, observation.step_times_s) == (status, steps_s)
    assert observation.time_limit_s == (TIME_LIMIT_S if status is Status.TIMEOUT else None)


def test_the_mailbox_may_be_asked_twice():
    """Steps are numbered and kept until they have been read, so that an answer that is late or lost loses none, and one
    that was restarted goes on from what has been read.
    """
    mailbox, restarted = Mailbox(), Mailbox()
    for step in "abc":
        mailbox.put(step)
        restarted.put(step)

    assert [mailbox.read(0), mailbox.read(0)] == [(0, ["a", "b", "c"])] * 2
    assert [mailbox.read(2), mailbox.read(0)] == [(2, ["c"])] * 2
    assert restarted.read(7) == (7, ["a", "b", "c"])


def test_a_mailbox_that_dies_is_replaced(executor):
    """Steps are seen while a trial runs also after the mailbox's process has died."""
    died = process_of_mailbox(executor)
    executor._ray.kill(executor._mailbox, no_restart=False)
    assert is_gone_soon(lambda: process_of_mailbox(executor) == died, limit_s=30.0)

    executor.submit(0, config_that("step_on"))

    follow(executor, 0, 2)
    executor.stop(0, "enough")
    ((_, observation),) = executor.poll(30.0)
    assert observation.status is Status.PRUNED


def test_the_time_of_a_trial_is_told(executor):
    """A trial says how long it took in its worker, which may be less than the driver waited, and when its first
    measured step began, also where it was cut off.
    """
    ended = observe(executor, {0: "succeed", 1: "hang", 2: "step_and_hang"})

    assert 0.0 <= ended[0].elapsed_s < TIME_LIMIT_S
    assert ended[1].elapsed_s >= TIME_LIMIT_S
    assert ended[1].censored_above_s(0.5) == TIME_LIMIT_S - 0.5
    assert ended[1].measured_after_s is None
    assert 0.0 <= ended[2].measured_after_s < TIME_LIMIT_S
    assert ended[0].lost_s == ended[1].lost_s == 0.0


def test_the_time_of_a_trial_that_is_given_up_counts_once(executor, monkeypatch):
    """Of a trial whose workers die, the last attempt is its own time and the one before it is lost; a wait for a worker
    that never starts is neither.
    """
    observe(executor, dict.fromkeys(range(SLOTS), "succeed"))
    begin_s = time.monotonic()
    died_twice = observe(executor, {0: "step_and_die"})[0]
    assert 0 < died_twice.measured_after_s + SECONDS_AFTER_STEPS <= died_twice.elapsed_s
    assert 0 < died_twice.lost_s <= time.monotonic() - begin_s - died_twice.elapsed_s

    with monkeypatch.context() as patched:
        start_all_workers(executor)
        patched.setattr("trials.on_ray.executor.START_LIMIT_S", 0.0)
        patched.setattr(executor, "_slot_class", NeverStarting(executor._slot_class))
        begin_s = time.monotonic()
        never_started = observe(executor, {0: "step_and_die"})[0]
        took_s = time.monotonic() - begin_s
    # other tests need workers that start
    for place in executor._places:
        executor._replace(place)
    start_all_workers(executor)

    assert "no worker started" in never_started.reason
    assert (never_started.elapsed_s, never_started.step_times_s) == (None, ())
    assert 0 < never_started.lost_s <= took_s


def test_nothing_is_left_and_stdout_is_clean(tmp_path):
    """A program that is not installed, runs trials that print and die, and is interrupted, leaves no process behind
    and nothing but its own text on standard output.
    """
    program = """
import json, signal, sys
from tests.support.programs.misbehaving_backend import MisbehavingBackend, config_that
from trials.on_ray.executor import RayExecutor
statuses = []
try:
    with RayExecutor(MisbehavingBackend(folder=sys.argv[1]), parallel_trials=2) as executor:
        executor.submit(0, config_that("succeed"))
        executor.submit(1, config_that("die"))
        while executor.pending:
            statuses += [str(observation.status) for _, observation in executor.poll(1.0)]
        executor.submit(2, config_that("hang"))
        signal.alarm(2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        executor.poll(60.0)
except KeyboardInterrupt:
    print(json.dumps(sorted(statuses)))
"""
    mark = f"MESHTUNE_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {name: value, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip

    assert done.stderr.count("Traceback") == 0, done.stderr
    assert json.loads(done.stdout) == ["incident", "ok"]
    assert is_gone_soon(lambda: marked_processes(mark)), marked_processes(mark)


def test_a_backend_that_no_worker_can_read_is_told(tmp_path):
    """Where the backend itself can't be loaded in workers, trials end as incidents that say what is missing, and no
    worker after the other is started for nothing.
    """
    program = """
import sys
from tests.support.programs.misbehaving_backend import DriversBackend, config_that
from trials.on_ray.executor import RayExecutor
with RayExecutor(DriversBackend(folder=sys.argv[1]), parallel_trials=1, address="local") as executor:
    executor.submit(0, config_that("succeed"))
    while executor.pending:
        for _, observation in executor.poll(1.0):
            print(observation.status, observation.reason)
    for _ in range(40):
        executor.poll(0.1)
"""
    environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("incident its worker could not begin (ModuleNotFoundError: No module named")
    assert done.stdout.count("\n") == 1
    assert len(list(tmp_path.iterdir())) <= 3


@pytest.fixture
def deaf_port():
    """A port that takes connections and says nothing Ray would say."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]


@pytest.fixture
def closed_port():
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("port", ["deaf_port", "closed_port"])
def test_an_unreachable_cluster_is_told_soon(port, scheme, request, tmp_path):
    """An address where no Ray answers ends in one message that names it, not in minutes of waiting."""
    address = f"{scheme}127.0.0.1:{request.getfixturevalue(port)}"
    program = (
        "import sys\nfrom hardware.io.errors import ConfigError\nfrom trials.on_ray.executor import RayExecutor\n"
        "from tests.support.programs.misbehaving_backend import MisbehavingBackend\n"
        "try:\n    RayExecutor(MisbehavingBackend(folder=''), parallel_trials=1).__enter__()\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip

    assert done.stdout.startswith(f"address = '{address}': is not a Ray cluster that can be reached")


@pytest.mark.parametrize("field", [{"parallel_trials": 0}, {"parallel_trials": 1, "time_limit_s": 0.0}])
def test_senseless_arguments_are_refused(field):
    """No slots, and no time, are the user's mistakes."""
    with pytest.raises(ConfigError, match=list(field)[-1]):
        RayExecutor(MisbehavingBackend(folder=""), **field)
