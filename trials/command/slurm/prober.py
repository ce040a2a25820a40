"""Prober of the nodes of a Slurm job: a step beside those of the job, which ends with each probe.

The hosts of the step get their orders and give their answers through srun, so that no port but those of the transfers
is needed. Sources: the manual page of srun of Slurm 24.05 (`--overlap`, `--input`); checked with 22.05.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trials
from trials.command.slurm.nodes import slurm_nodes
from trials.command.slurm.queue import QueueError, job_environment
from trials.link_probe.contract import AbstractProber, HostPair, Measured, name_pair
from trials.link_probe.transfer import MOST_S, SENDER_LIMIT_S, make_token

START_LIMIT_S = 30.0
"""Time that Slurm has to start the step on all nodes [s]."""

ROUND_LIMIT_S = 2 * SENDER_LIMIT_S + MOST_S + 5.0
"""Time that the hosts have for the transfers of one round [s]."""

END_LIMIT_S = 5.0
_READ_BYTES = 65_536
_MOST_TROUBLE = 300


class SlurmProber(AbstractProber):
    """Prober of the nodes of a job.

    Args:
        job: Number of the job, which is this user's.
    """

    def __init__(self, job: str) -> None:
        self._job = job

    def measure(self, rounds: Sequence[Sequence[HostPair]], nodes: Mapping[str, str]) -> Measured:
        """Measure pairs of nodes; identities do not count."""
        names = sorted(nodes)
        try:
            addresses = {node.name: node.address for node in slurm_nodes(",".join(names))}
            step = _Step(self._job, names)
        except (QueueError, OSError) as error:
            return Measured(rates_bytes_per_s={}, troubles={", ".join(names): str(error)})
        with contextlib.closing(step):
            step.hear(names, lambda told: len(told) == 1, START_LIMIT_S)
            if step.is_over and not step.heard:
                return Measured(rates_bytes_per_s={}, troubles={", ".join(names): step.trouble or "srun has ended"})
            troubles = {name: f"has not started within {START_LIMIT_S:g} s" for name in names if name not in step.heard}
            rates: dict[HostPair, float] = {}
            for pairs in rounds:
                known = [pair for pair in pairs if not troubles.keys() & {*pair}]
                _run_round(step, known, addresses, rates, troubles)
        return Measured(rates_bytes_per_s=rates, troubles=troubles)

    def close(self) -> None:
        """Do nothing: each step has ended with its probe."""


def _run_round(
    step: _Step,
    pairs: Sequence[HostPair],
    addresses: Mapping[str, str],
    rates: dict[HostPair, float],
    troubles: dict[str, str],
) -> None:
    """Let the senders of one round send, and note what has arrived."""
    receivers = [receiver for _, receiver in pairs]
    step.tell({"listen": {receiver: addresses.get(sender, sender) for sender, receiver in pairs}})
    step.hear(receivers, lambda told: "place" in told, SENDER_LIMIT_S)
    transfers = []
    for sender, receiver in pairs:
        told = step.heard.get(receiver, {})
        if told.get("place"):
            transfers.append([sender, receiver, *told["place"], make_token().hex()])
        else:
            troubles[receiver] = str(told.get("trouble", f"gave no answer within {SENDER_LIMIT_S:g} s"))
    step.tell({"transfer": transfers})
    hosts = [name for transfer in transfers for name in transfer[:2]]
    step.hear(hosts, lambda told: "sent" in told or "rate" in told, ROUND_LIMIT_S)
    for sender, receiver, *_ in transfers:
        sent, arrived = step.heard.get(sender, {}), step.heard.get(receiver, {})
        for host, told, key in ((sender, sent, "sent"), (receiver, arrived, "rate")):
            if key not in told:
                troubles[host] = step.trouble or f"gave no answer within {ROUND_LIMIT_S:g} s"
        if "sent" in sent and "rate" in arrived:
            if sent["sent"] or arrived["rate"] is None:
                troubles[name_pair((sender, receiver))] = str(sent["sent"] or arrived["trouble"])
            else:
                rates[sender, receiver] = max(rates.get((sender, receiver), 0.0), float(arrived["rate"]))


class _Step:
    """Running step of the job, with one task on each of some nodes.

    Attributes:
        heard: Last answer of each host.
        is_over: Whether srun has closed its output.

    Raises:
        OSError: srun cannot be started.
    """

    def __init__(self, job: str, names: Sequence[str]) -> None:
        root = str(Path(trials.__file__).resolve().parents[1])
        paths = filter(None, (root, os.environ.get("PYTHONPATH")))
        command = (
            *("srun", f"--jobid={job}", "--overlap", f"--nodelist={','.join(names)}", "--quiet"),
            *(f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1", "--gres=none"),
            *("--cpu-bind=none", "--input=all", "--job-name=meshtune-probe"),
            *(sys.executable, "-m", "trials.link_probe.host_program"),
        )
        self._process = subprocess.Popen(  # noqa: S603 # our own module, by a program of Slurm, and no shell
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**job_environment(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._pipes = selectors.DefaultSelector()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None, "it was asked for"
            os.set_blocking(pipe.fileno(), False)
            self._pipes.register(pipe, selectors.EVENT_READ)
        self._begun, self._errors = b"", b""
        self.heard: dict[str, dict[str, Any]] = {}
        self.is_over = False

    @property
    def trouble(self) -> str:
        """Last line that srun or a host has written to standard error."""
        lines = self._errors.decode(errors="replace").strip().splitlines()
        return lines[-1][:_MOST_TROUBLE] if lines else ""

    def tell(self, order: Mapping[str, Any]) -> None:
        """Give all hosts an order."""
        assert self._process.stdin is not None, "it was asked for"
        self.heard = {}
        with contextlib.suppress(OSError):  # it has ended, which its output shows
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, hosts: Sequence[str], is_answer: Callable[[dict[str, Any]], bool], limit_s: float) -> None:
        """Read until all these hosts have answered, the step has ended, or the time is over."""
        until_s = time.monotonic() + limit_s
        while not all(host in self.heard and is_answer(self.heard[host]) for host in hosts):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self._pipes.get_map():
                return
            for key, _ in self._pipes.select(left_s):
                self._read(key.fd)

    def _read(self, pipe: int) -> None:
        assert self._process.stdout is not None, "it was asked for"
        data = os.read(pipe, _READ_BYTES)
        is_output = pipe == self._process.stdout.fileno()
        if not data:
            self._pipes.unregister(pipe)
            self.is_over = self.is_over or is_output
        if not is_output:
            self._errors = (self._errors + data)[-_READ_BYTES:]
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[-_READ_BYTES:]
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # what a site's prologue prints is no answer
                told = json.loads(line)
                self.heard[str(told["host"])] = told

    def close(self) -> None:
        """End the step: its hosts end with their input, and srun is killed if it does not end then."""
        self._pipes.close()
        try:
            self._process.communicate(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # srun then kills its tasks
            try:
                self._process.communicate(timeout=END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
