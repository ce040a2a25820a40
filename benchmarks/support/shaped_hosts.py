"""Hosts on this machine with adapters of a set bandwidth: network namespaces, joined by a bridge of veth pairs.

What a host sends passes a token bucket (tbf) in its namespace, and what it receives one at the bridge. That needs root,
and the programs `ip` and `tc` of iproute2. Everything that is made here is removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from trials.link_probe.contract import AbstractProber, HostPair, Measured, name_pair
from trials.link_probe.transfer import make_token

ROOT = Path(__file__).resolve().parents[2]

_TRAFFIC = """
import socket
import sys
import threading
import time

own, other, period_s, share = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
listening = socket.create_server((own, 7777))


def read(connection):
    while connection.recv(2**18):
        pass


def accept():
    while True:
        threading.Thread(target=read, args=listening.accept()[:1], daemon=True).start()


threading.Thread(target=accept, daemon=True).start()
print("ready", flush=True)
input()
connection = socket.create_connection((other, 7777))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)
while True:
    begin_s = time.time() // period_s * period_s
    if time.time() < begin_s + share * period_s:
        connection.sendall(bytes(2**16))
    else:
        time.sleep(max(begin_s + period_s - time.time(), 0.0))
"""


def missing() -> str:
    """Return what this machine lacks for such hosts, or nothing."""
    if os.geteuid():
        return "root"
    if lacking := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} (Debian: iproute2)"
    try:
        with ShapedHosts(1, 400):
            return ""
    except subprocess.CalledProcessError as error:  # a container may have no right to make networks
        return f"network namespaces ({error.stderr.decode(errors='replace').strip()})"


def address_of(number: int) -> str:
    """Return the address of a host by its number."""
    return f"10.77.0.{number + 1}"


class ShapedHosts(AbstractProber):
    """Hosts that last as long as the `with` block, and their prober.

    Args:
        count: Number of hosts.
        mbit_per_s: Bandwidth of each, in both directions [Mbit/s].

    Attributes:
        names: Names of the hosts.
    """

    def __init__(self, count: int, mbit_per_s: int) -> None:
        # names of interfaces have at most 15 characters
        self._bridge = f"mt{os.getpid()}"
        self.names = tuple(f"{self._bridge}h{number}" for number in range(count))
        self._address = {name: address_of(number) for number, name in enumerate(self.names)}
        self._mbit_per_s = mbit_per_s
        self._programs: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> ShapedHosts:
        """Make the hosts, and start their programs."""
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for name in self.names:
                _run("ip", "netns", "add", name)
                _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                _run("ip", "link", "set", name, "master", self._bridge, "up")
                _run("ip", "-n", name, "address", "add", f"{self._address[name]}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")  # by which a host reaches its own address
                self.shape(name, sends=1.0, receives=1.0)
                self._programs[name] = self._start(name, "-m", "trials.link_probe.host_program")
                _heard(self._programs[name])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the programs, and remove the hosts."""
        self.close()

    def shape(self, name: str, *, sends: float, receives: float) -> None:
        """Give a host shares of its bandwidth."""
        _run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *self._bucket(sends))
        _run("tc", "qdisc", "replace", "dev", name, "root", *self._bucket(receives))

    def _bucket(self, share: float) -> tuple[str, ...]:
        return ("tbf", "rate", f"{round(self._mbit_per_s * share)}mbit", "burst", "256kb", "latency", "50ms")

    def traffic(self, period_s: float, share: float) -> ExitStack:
        """Let every host send to the next one during a share of each period, until the result is closed.

        All begin a period at the same time, as a step of a training does.
        """
        stack, started = ExitStack(), []
        for name, other in zip(self.names, [*self.names[1:], self.names[0]], strict=True):
            places = (self._address[name], self._address[other])
            started.append(self._start(name, "-c", _TRAFFIC, *places, str(period_s), str(share)))
            stack.callback(_end, started[-1])
        for one in started:
            assert one.stdout is not None, "it was asked for"
            one.stdout.readline()
        for one in started:
            _tell(one, "")
        return stack

    def measure(self, rounds: Sequence[Sequence[HostPair]], nodes: Mapping[str, str]) -> Measured:  # noqa: ARG002 # contract
        """Measure pairs of these hosts; identities do not count."""
        rates: dict[HostPair, float] = {}
        troubles: dict[str, str] = {}
        for pairs in rounds:
            self._tell_all({"listen": {receiver: self._address[sender] for sender, receiver in pairs}})
            transfers = []
            for sender, receiver in pairs:
                place = _heard(self._programs[receiver])["place"]
                transfers.append([sender, receiver, *place, make_token().hex()])
            self._tell_all({"transfer": transfers})
            for sender, receiver in pairs:
                sent, arrived = _heard(self._programs[sender]), _heard(self._programs[receiver])
                if sent["sent"] or arrived["rate"] is None:
                    troubles[name_pair((sender, receiver))] = sent["sent"] or arrived["trouble"]
                else:
                    rates[sender, receiver] = max(rates.get((sender, receiver), 0.0), arrived["rate"])
        return Measured(rates_bytes_per_s=rates, troubles=troubles)

    def close(self) -> None:
        """End the programs, and remove the hosts."""
        for program in self._programs.values():
            _end(program)
        self._programs = {}
        for name in self.names:
            _run("ip", "netns", "delete", name, check=False)
            _run("ip", "link", "delete", name, check=False)
        _run("ip", "link", "delete", self._bridge, check=False)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *arguments],  # noqa: S607 # found on the path, like `tc`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # traffic is ended in the middle of a transfer
            env={**os.environ, "SLURMD_NODENAME": name, "PYTHONPATH": str(ROOT)},
            text=True,
        )

    def _tell_all(self, order: Mapping[str, Any]) -> None:
        for program in self._programs.values():
            _tell(program, json.dumps(order))


def _tell(program: subprocess.Popen[str], line: str) -> None:
    assert program.stdin is not None, "it was asked for"
    program.stdin.write(line + "\n")
    program.stdin.flush()


def _heard(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None, "it was asked for"
    told: dict[str, Any] = json.loads(program.stdout.readline())
    return told


def _end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate()


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)
