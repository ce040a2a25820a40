"""Who can reach what runs here: the listening sockets of real trials, as the kernel lists them (Linux)."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.studies.broken_studies import study
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's list of sockets is Linux's")

LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net/tcp and tcp6 write them."""

LISTENING = "0A"

LOOK_EVERY_S = 0.1

TORCH = {
    "model": str(Path(__file__).resolve().parents[3] / "configs" / "models" / "gpt-small.yaml"),
    "cluster": "{name: cpu-host, hosts: 1, devices_per_host: 2}",
    "runtime": "torch-reference",
    "job": "{sequence_length: 32, global_batch_size: 4, precision: fp32}",
    "current": "{dp: 2}",
    "search": "{max_trials: 1}",
    "trial": "{backend: torch, clock: wall, profile: false, min_steps: 100, max_steps: 100}",
}


def sockets():
    """Of all listening sockets of this machine: address and port by inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING:
                address, _, port = local.partition(":")
                found[inode] = (address, int(port, 16))
    return found


def ours():
    """The processes that descend from this one, or carry its mark, as Ray's and orphans do."""
    mark = f"{MARK}={os.getpid()}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry.parent.name == str(os.getpid()) or mark in entry.read_bytes().split(b"\0"):
                yield entry.parent
        except OSError:
            continue  # it has ended


MARK = "MESHTUNE_TEST_MARK"


def listening_at(process):
    """Addresses and ports at which a process, a folder of /proc, listens."""
    everything = sockets()
    links = [str(link.readlink()) for link in (process / "fd").iterdir()]
    return {everything[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in everything}


def listening_of_ours():
    """What our processes listen at, with what they are."""
    found = set()
    for process in ours():
        try:
            program = (process / "cmdline").read_bytes().replace(b"\0", b" ")[:120].decode(errors="replace")
            found |= {(*at, program) for at in listening_at(process)}
        except OSError:
            continue  # it has ended
    return found


@contextmanager
def watching():
    """Looks again and again at what our processes listen at; all that was seen, while and after the block runs."""
    seen, over = set(), Event()

    def look():
        while not over.wait(LOOK_EVERY_S):
            seen.update(listening_of_ours())

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_trials_listen_on_this_machine_alone(tmp_path, monkeypatch):
    """While ranks train on the local Ray, every socket that any process of ours listens at is of the loopback address:
    Ray's own, that at which ranks find one another, and gloo's.
    """
    pytest.importorskip("torch", reason="torch is not installed (the extra `torch`)")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(MARK, str(os.getpid()))
    (tmp_path / "study.yaml").write_text(study(**TORCH), encoding="utf-8")
    config = load_study(tmp_path / "study.yaml", storage=f"sqlite:///{tmp_path}/study.db")

    with watching() as seen:
        result = run_study(config, on_progress=lambda _: None)

    assert result.best is not None
    for program in ("gcs_server", "raylet", "trials.ranks.server"):
        assert any(program in each for _, _, each in seen), seen
    assert {found for found in seen if found[0] not in LOOPBACK} == set()
