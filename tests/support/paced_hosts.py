"""Hosts on this machine whose links are really slow: the kernel paces what their Python processes send over TCP.

Processes on a host find a `sitecustomize` module that sets SO_MAX_PACING_RATE on each connection that they open. The
rate stands in a file for each host and may change at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SITE = """
import os
import socket
from pathlib import Path

SO_MAX_PACING_RATE = 47
host = os.environ.get("PACED_HOST") or os.environ.get("SLURMD_NODENAME", "")
rate = Path(os.environ["PACES"]) / host
connect = socket.socket.connect


def paced_connect(self, place):
    if host and self.type == socket.SOCK_STREAM:
        self.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate.read_text()))
    connect(self, place)


socket.socket.connect = paced_connect
"""


class PacedHosts:
    """Paces of hosts.

    Args:
        folder: Folder for their files.
        names: Names of the hosts.
        bytes_per_s: Rate of each at the beginning [bytes/s].

    Attributes:
        environment: Variables of all processes on the hosts. Where Slurm does not name the host, PACED_HOST does.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], bytes_per_s: int) -> None:
        self._folder = folder / "paces"
        site = folder / "site"
        for one in (self._folder, site):
            one.mkdir()
        (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        self.environment: Mapping[str, str] = {"PACES": str(self._folder), "PYTHONPATH": str(site)}
        for name in names:
            self.set_pace(name, bytes_per_s)

    def set_pace(self, name: str, bytes_per_s: int) -> None:
        """Let a host send at this rate from its next connection on."""
        written = self._folder / f"{name}.new"
        written.write_text(str(bytes_per_s), encoding="utf-8")
        written.replace(self._folder / name)
