"""Transfer of bytes from one host to another over TCP, timed by the receiver.

The receiver listens on one address of its host, for one sender. The sender begins with a token that both were given
and that serves once; a connection that begins with anything else is closed. The transfer ends after `MOST_BYTES` or
`MOST_S`, whichever comes first. The receiver ends it, so that a slow link is busy for no longer than a fast one.
"""

from __future__ import annotations

import bisect
import hmac
import secrets
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

MOST_BYTES = 64 * 2**20
"""Largest number of bytes that one transfer sends [bytes]."""

MOST_S = 0.3
"""Longest time of a transfer, from its first byte [s]."""

TOKEN_BYTES = 16
TOKEN_LIMIT_S = 1.0
"""Time that a connection has to show the token [s]."""

MOST_GUESTS = 64
"""Largest number of connections that may be open without having shown the token."""

SENDER_LIMIT_S = 5.0
"""Time within which the sender has to reach the receiver, and its first byte to arrive [s]."""

_BLOCK_BYTES = 256 * 2**10
_PARTS = 8
"""Number of parts of a transfer whose median rate counts, so that a pause of one process does not."""

_DROP = struct.pack("ii", 1, 0)  # close drops what is still to be sent (SO_LINGER of socket(7))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """Outcome of a transfer for its receiver.

    Attributes:
        rate_bytes_per_s: Rate at which bytes arrived [bytes/s]; None if none did.
        trouble: Reason why none arrived.
    """

    rate_bytes_per_s: float | None
    trouble: str = ""


def make_token() -> bytes:
    """Return a new token."""
    return secrets.token_bytes(TOKEN_BYTES)


def local_address(towards: str) -> str:
    """Return the address of this host from which it reaches another one; nothing is sent.

    Raises:
        OSError: There is no way to the other host, or no such host.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    except ValueError as error:
        raise OSError(f"{towards!r} is no name of a host: {error}") from None
    with socket.socket(family, kind) as one:
        one.connect(place)
        return str(one.getsockname()[0])


class Receiver:
    """Receiver of one transfer.

    Args:
        address: Address of this host, on which alone it listens.

    Attributes:
        port: Port on which it listens.

    Raises:
        OSError: The address is none of this host.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=MOST_GUESTS)
        self.port = int(self._listening.getsockname()[1])

    def receive(self, token: bytes) -> Arrived:
        """Receive the transfer of the sender that shows the token, and stop listening."""
        with self._listening:
            connection = _find_sender(self._listening, token, time.monotonic() + SENDER_LIMIT_S)
            if connection is None:
                return Arrived(rate_bytes_per_s=None, trouble=f"nothing arrived within {SENDER_LIMIT_S:g} s")
            with connection:
                return _receive(connection)

    def close(self) -> None:
        """Stop listening."""
        self._listening.close()


def send(address: str, port: int, token: bytes) -> str:
    """Send a transfer to a receiver; return why that failed, or nothing."""
    try:
        with socket.create_connection((address, port), timeout=SENDER_LIMIT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
            connection.sendall(token)
            block, left, until_s = bytes(_BLOCK_BYTES), MOST_BYTES, time.monotonic() + MOST_S
            # the receiver may close the connection first: then the transfer is over, and all is well
            with suppress(ConnectionError, TimeoutError):
                while left > 0 and time.monotonic() < until_s:
                    left -= connection.send(memoryview(block)[:left])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
    except (OSError, ValueError) as error:  # ValueError: a name that no host can have, or a port that there is not
        return f"{address} cannot be reached: {getattr(error, 'strerror', None) or error}"
    return ""


def median_rate(marks: Sequence[tuple[float, int]]) -> float:
    """Return the median rate of the equal parts of a transfer [bytes/s].

    Args:
        marks: Time [s] and number of bytes until then, at least two, both ascending.
    """
    times_s, totals = [mark[0] for mark in marks], [mark[1] for mark in marks]
    ends = [totals[0] + (totals[-1] - totals[0]) * part / _PARTS for part in range(_PARTS + 1)]
    at_s = [_time_of(end, times_s, totals) for end in ends]
    lasted_s = statistics.median(later - sooner for sooner, later in pairwise(at_s))
    return (totals[-1] - totals[0]) / _PARTS / lasted_s


def _time_of(total: float, times_s: Sequence[float], totals: Sequence[int]) -> float:
    """Interpolate the time at which so many bytes had arrived [s]."""
    after = min(max(bisect.bisect_left(totals, total), 1), len(totals) - 1)
    share = (total - totals[after - 1]) / (totals[after] - totals[after - 1])
    return times_s[after - 1] + share * (times_s[after] - times_s[after - 1])


class _Guest:
    """Connection that has not shown the whole token yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.shown, self.until_s = connection, b"", time.monotonic() + TOKEN_LIMIT_S

    def read(self, token: bytes) -> bool | None:
        """Read what has come; return whether it is the token, and None while that cannot be said."""
        try:
            more = self.connection.recv(len(token) - len(self.shown))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self.shown += more
        if more and len(self.shown) < len(token):
            return None
        return hmac.compare_digest(self.shown, token)


def _find_sender(listening: socket.socket, token: bytes, until_s: float) -> socket.socket | None:
    """Return the first connection that begins with the token; None if there is none in time.

    Connections are heard side by side: one that is silent keeps nobody waiting.
    """
    listening.setblocking(False)
    guests: dict[socket.socket, _Guest] = {}
    sender: socket.socket | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while sender is None and (now_s := time.monotonic()) < until_s:
            ready = selector.select(min([until_s, *(guest.until_s for guest in guests.values())]) - now_s)
            for one in [key.fileobj for key, _ in ready]:
                if one is listening:
                    _welcome(listening, guests, selector)
                elif isinstance(one, socket.socket) and (is_sender := guests[one].read(token)) is not None:
                    guests.pop(one)
                    selector.unregister(one)
                    if is_sender and sender is None:
                        sender = one
                    else:
                        one.close()
            for one in [one for one, guest in guests.items() if guest.until_s <= time.monotonic()]:
                guests.pop(one)
                selector.unregister(one)
                one.close()
    for one in guests:
        one.close()
    if sender is not None:
        sender.setblocking(True)
    return sender


def _welcome(listening: socket.socket, guests: dict[socket.socket, _Guest], selector: selectors.BaseSelector) -> None:
    """Accept a connection; if there are too many, the one that has been silent for longest makes room."""
    try:
        connection, _ = listening.accept()
    except OSError:  # it is gone already
        return
    if len(guests) >= MOST_GUESTS:
        oldest = next(iter(guests))
        guests.pop(oldest)
        selector.unregister(oldest)
        oldest.close()
    guests[connection] = _Guest(connection)
    selector.register(connection, selectors.EVENT_READ)


def _receive(connection: socket.socket) -> Arrived:
    """Receive until the sender ends or a limit is reached."""
    buffer = bytearray(_BLOCK_BYTES)
    marks: list[tuple[float, int]] = []
    total, until_s = 0, time.monotonic() + SENDER_LIMIT_S
    with suppress(OSError):  # a sender that is gone, or silent until the end
        while total < MOST_BYTES and (left_s := until_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            count = connection.recv_into(buffer)
            if not count:
                break
            now_s = time.monotonic()
            total += count
            if not marks:
                until_s = now_s + MOST_S
            elif now_s == marks[-1][0]:
                marks.pop()
            marks.append((now_s, total))
    if not marks:
        return Arrived(rate_bytes_per_s=None, trouble=f"no byte arrived within {SENDER_LIMIT_S:g} s")
    if len(marks) == 1:  # a link so slow that nothing followed the first bytes
        return Arrived(rate_bytes_per_s=total / MOST_S)
    return Arrived(rate_bytes_per_s=median_rate(marks))
