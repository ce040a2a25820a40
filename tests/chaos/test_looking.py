"""What is looked at from outside: the ledger, and what processes hold of the machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.shared_memory import SharedMemory

import pytest

from benchmarks.support.process_table import marked_processes
from tests.chaos.faults import FAULTS
from tests.chaos.ledger import read_ledger, running
from tests.chaos.left_behind import held_by, held_now
from tests.chaos.rounds import planned
from tests.chaos.studies import PROGRAM
from tests.chaos.trial_program import step_ms


def test_a_trial_keeps_the_ledger(tmp_path):
    """The trials' program notes its beginning while it runs and its end when it has ended, with what it printed."""
    ledger, printed = tmp_path / "ledger", tmp_path / "printed"
    mark = f"MESHTUNE_TRIAL={os.getpid()}"
    name, _, value = mark.partition("=")
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(ledger), "3", "tp=1", "dp=2"],
            env=os.environ | {name: value},
            stdout=output,
        )
    deadline_s = time.monotonic() + 60
    while not (during := running(read_ledger(ledger))):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.wait()
    (child,) = marked_processes(mark)
    os.kill(child, signal.SIGKILL)

    begin, end = read_ledger(ledger)

    assert during == (begin,)
    assert running((begin, end)) == ()
    assert (begin.event, end.event, begin.trial, begin.configuration) == ("begin", "end", 3, "tp=1 dp=2")
    assert end.step_s == pytest.approx(step_ms("tp=1 dp=2") / 1000)
    assert f"{step_ms('tp=1 dp=2'):.3f}" in printed.read_text(encoding="utf-8")


HOLDER = """
import socket, sys
from multiprocessing.shared_memory import SharedMemory
server = socket.create_server(("127.0.0.1", 0))
memory = SharedMemory(create=True, size=4096)
print(server.getsockname()[1], memory.name, flush=True)
sys.stdin.read()
memory.unlink()
"""


def test_what_processes_hold_is_seen():
    """A marked process is seen with its port and its shared memory while it holds them, and not after."""
    mark = f"MESHTUNE_HOLDER={os.getpid()}"
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=os.environ | {name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        port, segment = process.stdout.readline().split()
        held, now = held_by(mark), held_now(mark)
        process.communicate("")
    after = held_now(mark)

    assert held.processes == now.processes != after.processes
    assert [number for number, _ in held.ports] == [int(port)]
    assert held.ports <= now.ports
    assert held.segments == {segment.lstrip("/")} <= now.segments
    assert not held.ports & after.ports
    assert not held.segments & after.segments
    with pytest.raises(FileNotFoundError):
        SharedMemory(segment)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)))


def test_a_seed_makes_the_same_schedule():
    """A round is the same whenever its seed and number are, others are not, and all faults come up in a few."""
    rounds = [planned(number, 5) for number in range(40)]

    assert rounds == [planned(number, 5) for number in range(40)]
    assert rounds[0] != planned(0, 6)
    assert {strike.fault for each in rounds for strike in each.strikes} | {"fill disk"} == set(FAULTS)
    for each in rounds:
        assert all(FAULTS[s.fault].suits(each.storage, each.trials, each.ray) for s in each.strikes)


def test_faults_come_again_where_many_are_wanted():
    """A long round has all faults that suit it before one of them comes again."""
    faults = Counter(strike.fault for strike in planned(3, 5, most_faults=50).strikes)

    assert faults.total() == 50
    assert max(faults.values()) - min(faults.values()) <= 1
