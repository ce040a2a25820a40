"""How long the ranks of a trial are listened to."""

import time

import pytest

from trials.ranks.listening import listen
from trials.ranks.messages import Exit, Told


class Ranks:
    """One rank that sends events one after the other, each after a pause [s]."""

    def __init__(self, *events):
        self.left = list(events)

    @property
    def running(self):
        """Rank 0 until its exit is told."""
        return frozenset({0} if self.left else ())

    def events(self, timeout_s):
        """The next event, if its pause ends before the timeout."""
        pause_s, event = self.left[0]
        time.sleep(min(pause_s, timeout_s))
        if pause_s > timeout_s:
            self.left[0] = (pause_s - timeout_s, event)
            return []
        self.left.pop(0)
        return [event]


class Listener:
    """Notes events; has enough after `wanted` values, and ends after a value `failed`."""

    def __init__(self, wanted=99):
        self.wanted, self.taken = wanted, []

    @property
    def is_enough(self):
        """Whether as many events have come as are wanted."""
        return len(self.taken) >= self.wanted

    @property
    def is_ending(self):
        """Whether a rank has failed."""
        return "failed" in self.taken

    def take(self, event):
        """Note a value, or an exit."""
        self.taken.append(event.value if isinstance(event, Told) else "exit")


EXIT = Exit(rank=0, code=0, peak_bytes=1, cpu_s=0.0)


def told(value):
    """A value that rank 0 has sent."""
    return Told(rank=0, value=value)


@pytest.mark.parametrize(
    ("events", "wanted", "hangs", "taken"),
    [
        ([(0, told("a")), (0, EXIT)], 99, False, ["a", "exit"]),
        ([(0, told("a")), (0, told("b")), (0, EXIT)], 1, False, ["a"]),
        ([(0, told("a")), (9, EXIT)], 99, True, ["a"]),
        ([(0, told("failed")), (9, EXIT)], 99, False, ["failed"]),
        ([(0.1, told("a"))] * 3 + [(0, EXIT)], 99, False, ["a", "a", "a", "exit"]),
    ],
    ids=["until all have ended", "until it is enough", "until they hang", "until grace is over", "while they speak"],
)
def test_listening_ends_when_nothing_more_is_to_be_learned(events, wanted, hangs, taken):
    """Ranks are heard until they have ended, enough is known, they are silent, or one has failed some time ago."""
    listener = Listener(wanted)

    assert listen(Ranks(*events), listener, hang_limit_s=0.2, grace_s=0.1) is hangs
    assert listener.taken == taken
