"""Listening sockets of this machine, as the kernel lists them (Linux), and the processes to which they belong."""

import os
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net/tcp and tcp6 write them."""

LISTENING = "0A"
LOOK_EVERY_S = 0.1

MARK = "MESHTUNE_TEST_MARK"
"""Environment variable that holds the number of this process in all that it starts, Ray's processes and orphans too."""


def listening_at(process):
    """Return addresses and ports at which a process, given as a folder of /proc, listens."""
    return _of_process(process, _listening())


@contextmanager
def watch_listening():
    """Look again and again at what this process and those with its mark listen at: (address, port, program)."""
    seen, over = set(), Event()

    def look():
        while not over.wait(LOOK_EVERY_S):
            seen.update(_listening_of_ours())

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _listening():
    """Return address and port of all listening sockets of this machine by inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING:
                address, _, port = local.partition(":")
                found[inode] = (address, int(port, 16))
    return found


def _of_process(process, everything):
    links = [str(link.readlink()) for link in (process / "fd").iterdir()]
    return {everything[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in everything}


def _listening_of_ours():
    everything, found, mark = _listening(), set(), f"{MARK}={os.getpid()}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name == str(os.getpid()) or mark in (process / "environ").read_bytes().split(b"\0"):
                program = (process / "cmdline").read_bytes().replace(b"\0", b" ")[:120].decode(errors="replace")
                found |= {(*at, program) for at in _of_process(process, everything)}
        except OSError:
            continue  # it has ended
    return found
