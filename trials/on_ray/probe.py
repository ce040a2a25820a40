"""Prober of the nodes of a Ray cluster: an actor without CPUs on each node, which stays between two probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trials.link_probe.contract import AbstractProber, HostPair, Measured, name_pair
from trials.link_probe.transfer import Arrived, Receiver, make_token, send
from trials.on_ray.cluster import first_line
from trials.on_ray.local import import_ray

ANSWER_LIMIT_S = 15.0
"""Time that a node has to start its actor, and to answer [s]: longer than a sender may need to reach its receiver.

An actor that starts later serves the next probe.
"""


class _ProbeHost:
    """Actor on one node."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None

    def is_ready(self) -> bool:
        return True

    def listen(self) -> tuple[str, int]:
        """Listen on the node's address; return it with the port."""
        self._close()
        address = str(import_ray().util.get_node_ip_address())
        self._receiver = Receiver(address)
        return address, self._receiver.port

    def receive(self, token: bytes) -> Arrived:
        assert self._receiver is not None, "it listens before it receives"
        return self._receiver.receive(token)

    def send(self, address: str, port: int, token: bytes) -> str:
        return send(address, port, token)

    def _close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()


class RayProber(AbstractProber):
    """Prober of a cluster that this process has joined.

    Args:
        ray: The module ray, joined to the cluster.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actors: dict[str, Any] = {}  # by the identity of the node
        self._starting: dict[str, Any] = {}  # answers of actors that may not have started, by the same

    def measure(self, rounds: Sequence[Sequence[HostPair]], nodes: Mapping[str, str]) -> Measured:
        """Measure pairs of nodes; an identity is the one that Ray gives a node."""
        troubles: dict[str, str] = {}
        self._start(nodes, troubles)
        rates: dict[HostPair, float] = {}
        for pairs in rounds:
            known = [pair for pair in pairs if not troubles.keys() & {*pair}]
            for pair, arrived in self._run_round(known, nodes, troubles).items():
                if arrived.rate_bytes_per_s is not None:
                    rates[pair] = max(rates.get(pair, 0.0), arrived.rate_bytes_per_s)
                else:
                    troubles.setdefault(name_pair(pair), arrived.trouble)
        for name, identity in nodes.items():
            if name in troubles and identity not in self._starting:
                self._end(identity)  # the next probe tries another actor
        return Measured(rates_bytes_per_s=rates, troubles=troubles)

    def close(self) -> None:
        """End all actors."""
        for identity in [*self._actors]:
            self._end(identity)

    def _start(self, nodes: Mapping[str, str], troubles: dict[str, str]) -> None:
        """Start the actors that are missing, end those of nodes that are gone, and wait for the new ones."""
        for identity in self._actors.keys() - {*nodes.values()}:
            self._end(identity)
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        kind = self._ray.remote(_ProbeHost)
        for identity in nodes.values():
            if identity not in self._actors:
                placed = strategy(node_id=identity, soft=False)
                self._actors[identity] = kind.options(num_cpus=0, scheduling_strategy=placed).remote()
                self._starting[identity] = self._actors[identity].is_ready.remote()
        asked = {name: self._starting[identity] for name, identity in nodes.items() if identity in self._starting}
        _, late = self._ask(asked, troubles)
        for name in asked.keys() - late:
            self._starting.pop(nodes[name])

    def _run_round(
        self, pairs: Sequence[HostPair], nodes: Mapping[str, str], troubles: dict[str, str]
    ) -> dict[HostPair, Arrived]:
        """Let the senders of one round send; return what has arrived."""
        actor = {name: self._actors[nodes[name]] for pair in pairs for name in pair}
        places, _ = self._ask({receiver: actor[receiver].listen.remote() for _, receiver in pairs}, troubles)
        open_pairs = [pair for pair in pairs if pair[1] in places]
        receiving, sending = {}, {}
        for sender, receiver in open_pairs:
            token = make_token()
            receiving[receiver] = actor[receiver].receive.remote(token)
            sending[sender] = actor[sender].send.remote(*places[receiver], token)
        arrived, _ = self._ask(receiving, troubles)
        sent, _ = self._ask(sending, troubles)
        found = {}
        for sender, receiver in open_pairs:
            if receiver in arrived and sender in sent:
                one: Arrived = arrived[receiver]
                found[sender, receiver] = Arrived(rate_bytes_per_s=None, trouble=sent[sender]) if sent[sender] else one
        return found

    def _ask(self, asked: Mapping[str, Any], troubles: dict[str, str]) -> tuple[dict[str, Any], set[str]]:
        """Wait for the answers of nodes; return them by the node's name, and the nodes that gave none in time."""
        references = list(asked.values())
        ready: Sequence[Any] = ()
        if references:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=ANSWER_LIMIT_S)
        answers, late = {}, set()
        for name, reference in asked.items():
            if reference not in ready:
                troubles[name] = f"gave no answer within {ANSWER_LIMIT_S:g} s"
                late.add(name)
                continue
            try:
                answers[name] = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                troubles[name] = first_line(getattr(error, "cause", None) or error)  # what the actor itself has raised
        return answers, late

    def _end(self, identity: str) -> None:
        self._starting.pop(identity, None)
        self._ray.kill(self._actors.pop(identity), no_restart=True)
