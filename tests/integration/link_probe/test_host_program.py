"""Program of a host of a probe: three run on this machine, and get their orders as a batch system gives them."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support.documented import ROOT
from trials.link_probe.transfer import make_token

LIMIT_S = 60.0
NAMES = ("a", "b", "c")


@pytest.fixture
def hosts():
    """Three hosts that have said that they are there, by their names."""
    with ExitStack() as stack:
        found = {}
        for name in NAMES:
            found[name] = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "trials.link_probe.host_program"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "SLURMD_NODENAME": name, "PYTHONPATH": str(ROOT)},
                    text=True,
                )
            )
            stack.callback(found[name].kill)
        assert [heard(found[name]) for name in NAMES] == [{"host": name} for name in NAMES]
        yield found


def heard(host):
    """The next answer of a host."""
    return json.loads(host.stdout.readline())


def tell(hosts, order):
    """Give all hosts an order."""
    for host in hosts.values():
        host.stdin.write(json.dumps(order) + "\n")
        host.stdin.flush()


def test_hosts_follow_their_orders(hosts):
    """Of an order that all hosts read, each does its own part: the receiver listens where the sender reaches it, both
    tell how the transfer went, the third is silent, and all end with their input.
    """
    rates = []
    for sender, receiver in (("a", "b"), ("b", "a")):
        tell(hosts, {"listen": {receiver: "127.0.0.1"}})
        place = heard(hosts[receiver])["place"]
        tell(hosts, {"transfer": [[sender, receiver, *place, make_token().hex()]]})
        assert heard(hosts[sender]) == {"host": sender, "sent": ""}
        rates.append(heard(hosts[receiver]))
    for host in hosts.values():
        host.stdin.close()

    assert place[0] == "127.0.0.1"
    assert [(told["host"], told["trouble"]) for told in rates] == [("b", ""), ("a", "")]
    assert all(told["rate"] > 0 for told in rates)
    assert [host.stdout.read() for host in hosts.values()] == ["", "", ""]
    assert [host.wait(LIMIT_S) for host in hosts.values()] == [0, 0, 0]


def test_what_fails_is_told(hosts):
    """A receiver without a way to its sender, and a sender whose receiver does not listen, say so and serve on."""
    tell(hosts, {"listen": {"b": "255.255.255.255"}})  # which no socket may reach unasked
    lost = heard(hosts["b"])
    tell(hosts, {"listen": {"b": "127.0.0.1"}})
    place = heard(hosts["b"])["place"]
    tell(hosts, {"listen": {"b": "127.0.0.1"}})  # its sender did not come
    again = heard(hosts["b"])["place"]
    tell(hosts, {"transfer": [["a", "c", *place, make_token().hex()]]})
    refused = heard(hosts["a"])

    assert lost["place"] is None
    assert "cannot listen" in lost["trouble"]
    assert again[0] == place[0]
    assert "127.0.0.1 cannot be reached" in refused["sent"]
