"""Transfers of a probe between sockets of this machine: their rate, their bounds, and strangers."""

import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from trials.link_probe import transfer
from trials.link_probe.transfer import MOST_BYTES, MOST_S, Receiver, local_address, make_token, send

LOOPBACK = "127.0.0.1"
SO_MAX_PACING_RATE = 47


@pytest.fixture
def receiver():
    """A receiver on this machine."""
    one = Receiver(LOOPBACK)
    yield one
    one.close()


def sending(receiver, token):
    """A sender that runs beside the receiver, and the list that takes what it returns."""
    told = []
    thread = threading.Thread(target=lambda: told.append(send(LOOPBACK, receiver.port, token)))
    thread.start()
    return thread, told


def test_bytes_arrive_and_end(receiver, monkeypatch):
    """A transfer has a rate, no more bytes than the limit are sent, and both sides end by themselves."""
    monkeypatch.setattr(transfer, "MOST_BYTES", 2**22)
    monkeypatch.setattr(transfer, "MOST_S", 60.0)
    token = make_token()
    thread, told = sending(receiver, token)
    arrived = receiver.receive(token)
    thread.join(30)

    assert not thread.is_alive()
    assert told == [""]
    assert arrived.trouble == ""
    assert arrived.rate_bytes_per_s > 0


@pytest.mark.parametrize("bytes_per_s", [2_000_000, 20_000_000])
def test_the_rate_of_a_slow_link(receiver, monkeypatch, bytes_per_s):
    """A sender that the kernel paces is measured at its pace, in hardly more than the time that a transfer may take."""
    connect = socket.create_connection

    def paced(*place, **options):
        connection = connect(*place, **options)
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        return connection

    monkeypatch.setattr(socket, "create_connection", paced)
    token = make_token()
    thread, told = sending(receiver, token)
    began_s = time.monotonic()
    arrived = receiver.receive(token)
    thread.join(30)
    lasted_s = time.monotonic() - began_s

    assert told == [""]
    assert arrived.rate_bytes_per_s == pytest.approx(bytes_per_s, rel=0.4)
    assert lasted_s < MOST_S + 5.0
    assert bytes_per_s * MOST_S < MOST_BYTES


@pytest.mark.parametrize("shown", [b"", b"short", b"x" * 16, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_is_turned_away(receiver, monkeypatch, shown):
    """A connection without the token is closed and counts for nothing, and the sender with the token is still heard."""
    monkeypatch.setattr(transfer, "TOKEN_LIMIT_S", 0.2)
    token = make_token()
    with socket.create_connection((LOOPBACK, receiver.port)) as stranger:
        stranger.sendall(shown)
        thread, told = sending(receiver, token)
        arrived = receiver.receive(token)
        thread.join(30)
        stranger.settimeout(30)
        try:
            left = stranger.recv(1)
        except ConnectionResetError:
            left = b""

    assert left == b""
    assert told == [""]
    assert arrived.rate_bytes_per_s > 0


def join(crowd, receiver, shown):
    """Open as many connections to a receiver as it takes at once, at most 60, and show the same on each."""
    for _ in range(60):
        with suppress(TimeoutError):
            crowd.enter_context(socket.create_connection((LOOPBACK, receiver.port), timeout=0.05)).sendall(shown)


@pytest.mark.parametrize("shown", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n"], ids=["silent", "slow", "talking"])
def test_a_crowd_of_strangers_keeps_nobody_waiting(receiver, monkeypatch, shown):
    """However many connections stand open without the token, the sender that has it is heard at once; without one the
    receiver ends in time, and closes them all.
    """
    monkeypatch.setattr(transfer, "SENDER_LIMIT_S", 2.0)
    with ExitStack() as crowd:
        join(crowd, receiver, shown)
        token = make_token()
        began_s = time.monotonic()
        thread, told = sending(receiver, token)
        arrived = receiver.receive(token)
        lasted_s = time.monotonic() - began_s
        thread.join(30)
        other = crowd.enter_context(closing(Receiver(LOOPBACK)))
        join(crowd, other, shown)
        began_s = time.monotonic()
        nothing = other.receive(make_token())
        waited_s = time.monotonic() - began_s

    assert told == [""]
    assert arrived.rate_bytes_per_s > 0
    assert lasted_s < MOST_S + 1.5
    assert "nothing arrived" in nothing.trouble
    assert waited_s < 3.0


@pytest.mark.parametrize(
    "name", ["a" * 70, "a..b", "x\0y", "-oProxyCommand=touch /tmp/x", "host\nother", "\u2603" * 80, ""]
)
def test_a_name_that_no_host_has_is_a_trouble(name):
    """A hostile name of a host is one sentence for the sender and the receiver, and no exception of another kind."""
    assert "cannot be reached" in send(name, 9, make_token()) or name == ""
    with suppress(OSError):
        local_address(name)


def test_nobody_sends(receiver, monkeypatch):
    """A receiver whose sender does not come says so in time, and listens no more."""
    monkeypatch.setattr(transfer, "SENDER_LIMIT_S", 0.2)
    arrived = receiver.receive(make_token())

    assert arrived.rate_bytes_per_s is None
    assert "nothing arrived within 0.2 s" in arrived.trouble
    assert "cannot be reached" in send(LOOPBACK, receiver.port, make_token())


def test_it_listens_on_one_address_alone(receiver):
    """A receiver is reached at the address that it was given, and at no other of the same host."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", receiver.port), timeout=10).close()
    assert local_address("127.0.0.2") == LOOPBACK
    with pytest.raises(OSError, match=r"."):
        Receiver("192.0.2.1")  # of the addresses for documentation, which no host has (RFC 5737)
