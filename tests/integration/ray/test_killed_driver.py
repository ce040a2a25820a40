"""What is left of a local Ray after its driver was killed, in any order and together with parts of Ray."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.support.process_table import below
from trials.on_ray.keeper import MARK, ray_processes, session_of
from trials.on_ray.leftovers import left_processes

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 10.0
"""Nothing of ours lives longer than this after its driver."""

DRIVER = """
import sys, time
from trials.on_ray.local import import_ray, renew_keepers, start_local_ray
start_local_ray(2)
ray = import_ray()
at_work = ray.remote(lambda: time.sleep(300)).remote()
print("started", flush=True)
while True:
    renew_keepers()
    time.sleep(0.2)
"""


def start_of(process):
    """The moment at which a process started, which tells it from a later one of its number; none where it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def command_of(process):
    """The command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


@contextmanager
def driver_with_ray():
    """A program with a local Ray, two agents of which have had the time to start."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        deadline_s = time.monotonic() + 60
        while sum("Agent" in command_of(each) for each in below(process.pid)) < 2:
            assert time.monotonic() < deadline_s, "Ray has two agents"
            time.sleep(0.1)
        time.sleep(1.0)
        yield process
    finally:
        for each in (process.pid, *below(process.pid)):
            with ExitStack() as stack:
                stack.callback(process.poll)
                if start_of(each):
                    os.kill(each, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def other():
    """A program with a local Ray beside those that are killed."""
    with driver_with_ray() as process:
        yield process


def kill(driver, *names):
    """Kills the children of a driver whose command lines hold these names, in that order, and `driver` itself.

    It waits for a moment at `later`.
    """
    for name in names:
        if name == "later":
            time.sleep(1.0)
            continue
        if name == "driver":
            driver.kill()
            driver.wait()
            continue
        victims = [each for each in below(driver.pid) if name in command_of(each)]
        assert victims, name
        for each in victims[: 1 if name == "on_ray/keeper.py" else None]:
            os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize(
    "order",
    [
        ("raylet/raylet", "gcs_server", "driver"),
        ("on_ray/keeper.py", "driver"),
        ("on_ray/keeper.py", "ray::", "gcs_server", "driver"),
        ("on_ray/keeper.py", "later", "on_ray/keeper.py", "later", "on_ray/keeper.py", "gcs_server", "driver"),
    ],
    ids=" ".join,
)
def test_nothing_lives_long_after_its_driver(order):
    """Whichever of driver, keeper, GCS, raylet and workers are killed, after ten seconds no process of them is left."""
    with driver_with_ray() as driver:
        started = {each: start_of(each) for each in below(driver.pid)}
        commands = {each: command_of(each) for each in started}

        kill(driver, *order)
        deadline_s = time.monotonic() + LIMIT_S
        while left := {commands[each] for each, start in started.items() if start_of(each) == start}:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)


def test_what_nobody_has_ended_is_told(other):
    """Where both keepers are killed with the driver, its agents are told with their session, a living Ray is not."""
    with driver_with_ray() as driver:
        agents = {each for each in below(driver.pid) if "Agent" in command_of(each)}
        kept = {*below(other.pid)}
        driver.send_signal(signal.SIGSTOP)  # it would start others
        kill(driver, "on_ray/keeper.py")
        kill(driver, "on_ray/keeper.py")
        kill(driver, "gcs_server", "driver")
        time.sleep(3.0)
        found = left_processes()
        for process in found:
            os.kill(process.pid, signal.SIGKILL)

    assert agents <= {process.pid for process in found}
    assert not kept & {process.pid for process in found}
    assert {process.session.rpartition("_")[2] for process in found} == {str(driver.pid)}


def test_another_drivers_ray_is_left_alone(other):
    """The keepers of a killed driver end its Ray, and no process of one that another driver has beside it."""
    with driver_with_ray() as driver:
        started = {each: start_of(each) for each in below(other.pid)}
        own = {each: start_of(each) for each in below(driver.pid)}

        kill(driver, "driver")
        deadline_s = time.monotonic() + LIMIT_S
        while left := {command_of(each) for each, start in own.items() if start_of(each) == start}:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)

        assert {each: start_of(each) for each in below(other.pid)} == started


def test_agents_are_known_by_their_files(tmp_path):
    """An agent that has written its title over its mark is found by an open file of the session, and no other is."""
    folder = "/somewhere/ray"
    session = f"session_2026-01-02_03-04-05_678901_{os.getpid()}"
    logs = [tmp_path / name / "logs" for name in (session, session + "0")]
    with ExitStack() as stack:

        def process(title, *, file=None, **environment):
            """A process with a title of Ray's, an open file and an environment."""
            opened = stack.enter_context(file.open("w")) if file else subprocess.DEVNULL
            command = ["-c", "import time; print(flush=True); time.sleep(60)", f"--log_dir={logs[0]}/"]
            made = subprocess.Popen(
                [title, *(command if "server" in title else command[:2])],
                executable=sys.executable,
                env={**environment},
                stderr=opened,
                stdout=subprocess.PIPE,
            )
            stack.callback(made.stdout.close)
            stack.callback(made.wait)
            stack.callback(made.kill)
            made.stdout.readline()
            return made.pid

        for each in logs:
            each.mkdir(parents=True)
        server = process(f"{folder}/gcs_server", **{MARK: "this"})
        agent = process("ray::RuntimeEnvAgent", file=logs[0] / "agent.err")
        process("ray::RuntimeEnvAgent", file=logs[1] / "agent.err")  # of another session
        process("ray::IDLE", **{MARK: "other"})
        process("train", file=logs[0] / "train.err", **{MARK: "this"})  # a command that a worker has started

        assert session_of("this") == session
        assert session_of("nobody's") == ""
        assert {*ray_processes("this", folder, session)} == {server, agent}
